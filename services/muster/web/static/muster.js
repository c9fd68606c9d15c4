// What pages do beyond being read: times in the viewer's zone, a live page, choosing, copying, following a log.
// Without this script every page can be read and every form be sent.

const Idiomorph = window.Idiomorph; // vendor/idiomorph.min.js, a classic script that the page names before this one
const HIDDEN_SECONDS = 20; // between looks while the page is in the background: its title and icon still tell
const AGAIN_SECONDS = 2; // until the connection is tried again
const CLOCKS_DIFFER_MILLISECONDS = 3_000; // less than that is the way from the server to here
const LOG_SECONDS = 1; // between looks at a log that is followed
const LOG_CHARACTERS_MAX = 2_000_000; // shown of a followed log; older lines leave the page

// --- Times ---------------------------------------------------------------------------------------------------------

const moment = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });
const clock = new Intl.DateTimeFormat(undefined, { timeStyle: "medium" });
const day = new Intl.DateTimeFormat(undefined, { month: "short", day: "numeric" });
const dayAndYear = new Intl.DateTimeFormat(undefined, { dateStyle: "medium" });
const relative = new Intl.RelativeTimeFormat(undefined, { numeric: "auto", style: "short" });
const UNITS = [["day", 86_400], ["hour", 3_600], ["minute", 60], ["second", 1]];

// What the server's clock is ahead of the browser's, in milliseconds: "5 minutes ago" is said by the server's.
let ahead = 0;

function compareClocks(page) {
  const told = Number(page.querySelector("meta[name=muster-now]")?.content);
  const found = told * 1000 - Date.now();
  ahead = Number.isFinite(found) && Math.abs(found) > CLOCKS_DIFFER_MILLISECONDS ? found : 0;
}

function ago(date) {
  const seconds = Math.min(0, Math.round((date - Date.now() - ahead) / 1000));
  const [unit, size] = UNITS.find(([, size]) => Math.abs(seconds) >= size) ?? UNITS.at(-1);
  return relative.format(Math.trunc(seconds / size), unit);
}

// The time of day, and before it the day of what was not today: a list of events repeats no date.
function brief(date) {
  const now = new Date(Date.now() + ahead);
  if (date.toDateString() === now.toDateString()) return clock.format(date);
  return `${(date.getFullYear() === now.getFullYear() ? day : dayAndYear).format(date)}, ${clock.format(date)}`;
}

export function sayTimes(root = document) {
  for (const element of root.querySelectorAll("time[datetime]")) {
    const date = new Date(element.dateTime);
    const words = { ago, brief, clock: (at) => clock.format(at) }[element.dataset.form] ?? ((at) => moment.format(at));
    element.textContent = words(date);
    element.title = `${moment.format(date)} (${element.dateTime})`;
  }
}

// --- A page that keeps itself up to date ------------------------------------------------------------------------------

// What the reader did to the page stays: open details, ticks, what has the focus, and parts that say `data-keep`.
const STAYS = {
  beforeNodeMorphed(old, fresh) {
    if (old.nodeType !== Node.ELEMENT_NODE) return true;
    if (old.hasAttribute("data-keep")) return false;
    if (old.matches("input[type=checkbox], input:focus, select:focus, textarea:focus")) return false;
    if (old.matches("time") && fresh.nodeType === Node.ELEMENT_NODE && old.dateTime === fresh.dateTime) return false;
    return true;
  },
  beforeAttributeUpdated(name, node) {
    return !(name === "open" && node.tagName === "DETAILS") && !(name === "hidden" && node.matches("[data-shown]"));
  },
};

let asked = 0;
let pushing = 0; // looks at another address that somebody wants to see: news of this one must not overtake them

export async function show(address, { push = false } = {}) {
  if (!push && pushing) return;
  pushing += push;
  try {
    await look(address, push);
  } finally {
    pushing -= push;
  }
}

async function look(address, push) {
  const mine = ++asked;
  const reply = await fetch(address, { headers: { accept: "text/html" }, redirect: "follow" });
  if (mine !== asked) return; // a later look was quicker
  if (new URL(reply.url).pathname === "/sign-in") return endSession();
  if (reply.status === 404) return vanish();
  if (!reply.ok) return stale();
  const read = new DOMParser().parseFromString(await reply.text(), "text/html");
  fresh();
  compareClocks(read);
  document.getElementById("vanished").hidden = true;
  const main = document.getElementById("main");
  const before = document.querySelector(".job-heading")?.dataset.phase;
  const notices = document.getElementById("notices")?.childNodes.length && !push;
  if (notices) read.getElementById("notices")?.replaceWith(document.getElementById("notices").cloneNode(true));
  Idiomorph.morph(main, read.getElementById("main"), { callbacks: STAYS });
  document.title = read.title;
  const icon = document.querySelector("link[rel=icon]");
  const newIcon = read.querySelector("link[rel=icon]");
  if (icon && newIcon && icon.href !== newIcon.href) icon.replaceWith(newIcon);
  if (push) history.pushState(null, "", address);
  tend(document);
  const now = document.querySelector(".job-heading")?.dataset;
  if (before && now && now.phase !== before) {
    say(`${now.name} is ${now.phase}`);
    for (const each of document.querySelectorAll("#notices .good")) each.remove(); // it is of an act that is past now
  }
  document.dispatchEvent(new CustomEvent("muster:shown"));
}

let stream = null;
let staleSince = null;
let looking = false;
let newer = false; // there was news while the page was being read
let signedOut = null; // the timer that waits for somebody to sign in again

function listen() {
  const source = document.getElementById("main").dataset.live;
  if (stream || signedOut || !source || document.hidden) return;
  stream = new EventSource(source);
  stream.addEventListener("changed", refresh); // the first one at once: what happened meanwhile is not on the page
  stream.addEventListener("ended", endSession);
  stream.addEventListener("error", () => {
    stale();
    // The browser tries again by itself, unless the answer was no stream: the session may have ended meanwhile, or the
    // job be gone. The page itself tells which.
    if (stream?.readyState !== EventSource.CLOSED) return;
    hush();
    setTimeout(() => { refresh(); listen(); }, AGAIN_SECONDS * 1000);
  });
}

function hush() {
  stream?.close();
  stream = null;
}

// One look at a time: on a busy server pages are read less often, and no look is begun in vain.
async function refresh() {
  newer = true;
  if (looking) return;
  looking = true;
  while (newer && !signedOut) {
    newer = false;
    await show(location.href).catch(stale);
  }
  looking = false;
}

function stale() {
  staleSince ??= new Date();
  const banner = document.getElementById("stale");
  banner.querySelector("[data-stale-since]").textContent = `at ${clock.format(staleSince)}`;
  banner.hidden = signedOut !== null;
}

function vanish() {
  hush();
  fresh();
  delete document.getElementById("main").dataset.live;
  document.getElementById("vanished").hidden = false;
}

function fresh() {
  staleSince = null;
  document.getElementById("stale").hidden = true;
}

export function endSession() {
  if (signedOut) return;
  hush();
  fresh();
  document.getElementById("ended").hidden = false;
  signedOut = setInterval(async () => {
    const reply = await fetch("/api/v1/me").catch(() => null);
    if (!reply?.ok || !signedOut) return;
    clearInterval(signedOut);
    signedOut = null;
    document.getElementById("ended").hidden = true;
    await show(location.href).catch(stale);
    // The forms of this page belong to the session that ended; the fields keep what was typed.
    const token = document.querySelector("input[name=form_token]")?.value;
    const page = await fetch(location.href).then((it) => it.text());
    const renewed = new DOMParser().parseFromString(page, "text/html").querySelector("input[name=form_token]")?.value;
    if (token && renewed) for (const field of document.querySelectorAll("input[name=form_token]")) field.value = renewed;
    listen();
  }, AGAIN_SECONDS * 1000);
}

export function say(words) {
  document.getElementById("said").textContent = words;
}

// --- What is done on a page -------------------------------------------------------------------------------------------

function tend(root) {
  sayTimes(root);
  for (const element of root.querySelectorAll("[data-copy], [data-theme-toggle], .follow")) {
    element.hidden = false;
    element.dataset.shown = "";
  }
}

document.addEventListener("click", async (event) => {
  const target = event.target.closest("[data-copy], [data-theme-toggle], a[data-partial]");
  if (!target) return;
  if (target.matches("[data-copy]")) {
    await navigator.clipboard.writeText(target.dataset.copy).catch(() => null);
    target.textContent = "Copied";
    say("Copied");
    setTimeout(() => { target.textContent = "Copy"; }, 1500);
  } else if (target.matches("[data-theme-toggle]")) {
    const dark = getComputedStyle(document.documentElement).colorScheme === "dark"
      || (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
    theme(dark ? "light" : "dark");
  } else if (!(event.metaKey || event.ctrlKey || event.shiftKey || event.altKey)) {
    event.preventDefault();
    await show(target.href, { push: true }).catch(() => location.assign(target.href));
  }
});

let sendable = null; // the form that may be sent: a moment ago somebody was signed in

document.addEventListener("submit", async (event) => {
  if (event.defaultPrevented) return; // another script sends it
  const form = event.target, submitter = event.submitter;
  if (form === sendable) {
    sendable = null;
    return;
  }
  const asks = (submitter ?? form).dataset?.confirm;
  if (asks && !confirm(asks)) return event.preventDefault();
  if (form.matches("form[data-partial]")) {
    event.preventDefault();
    seek(form);
  } else if (form.querySelector("input[name=form_token]")) {
    // Sent to a server that is away, or without a session, a form would be lost with all that is in it.
    event.preventDefault();
    const reply = await fetch("/api/v1/me").catch(() => null);
    if (reply?.status === 401) return endSession();
    if (!reply?.ok) {
      stale();
      return say("Nothing was sent: the server does not answer. What you typed stays.");
    }
    // Of what has an id a newer page keeps the one that was pressed, and takes away the one that it lacks.
    if (!form.isConnected) return say("Nothing was sent: the page has changed meanwhile.");
    sendable = form;
    form.requestSubmit(submitter);
  }
});

let typing = null;
document.addEventListener("input", (event) => {
  if (event.target.matches("[data-submit-on-input]")) {
    clearTimeout(typing);
    typing = setTimeout(() => seek(event.target.form), 250);
  }
});

function seek(form) {
  const given = new Map(); // a field's values with commas between them
  for (const [name, value] of new FormData(form)) {
    if (value !== "") given.set(name, given.has(name) ? `${given.get(name)},${value}` : value);
  }
  const words = new URLSearchParams([...given]).toString().replaceAll("%2C", ",");
  const address = `${form.getAttribute("action")}?${words}`;
  show(address, { push: true }).catch(() => location.assign(address));
}

// --- Light and dark ---------------------------------------------------------------------------------------------------

function theme(name) {
  document.documentElement.dataset.theme = name;
  try { localStorage.setItem("muster-theme", name); } catch { /* a browser that keeps nothing */ }
}
try {
  const kept = localStorage.getItem("muster-theme");
  if (kept) document.documentElement.dataset.theme = kept;
} catch { /* likewise */ }

// --- Following a log --------------------------------------------------------------------------------------------------

async function followLog() {
  const log = document.getElementById("log");
  const box = document.querySelector("[data-follow]");
  if (log?.dataset.log && box?.checked && !document.hidden) {
    try {
      const reply = await fetch(`${log.dataset.log}&offset=${log.dataset.offset}`);
      if (reply.ok) append(log, await reply.json());
    } catch { /* the live stream says that the connection is gone */ }
  }
  if (log?.dataset.log) setTimeout(followLog, LOG_SECONDS * 1000);
}

// Colours, cursor moves and marks of direction, as rendering.plain takes them out of what the server writes.
const STEERING = /\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])|[\x00-\x08\x0b-\x1f\x7f-\x9f]|[\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;

function append(log, page) {
  if (page.text) {
    const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    const whole = log.textContent + page.text.replace(STEERING, "");
    log.textContent = whole.slice(-LOG_CHARACTERS_MAX);
    if (atEnd) log.scrollTop = log.scrollHeight;
  }
  log.dataset.offset = page.nextOffset; // also where nothing of the chosen rank was added
  const end = document.querySelector("[data-log-end]");
  if (end) end.textContent = page.nextOffset.toLocaleString("en");
  if (page.complete) delete log.dataset.log;
}

// --- Begin ------------------------------------------------------------------------------------------------------------

compareClocks(document);
tend(document);
const log = document.getElementById("log");
if (log?.dataset.log) log.scrollTop = log.scrollHeight;
listen();
followLog();
setInterval(() => { for (const each of document.querySelectorAll("time[data-form=ago]")) each.textContent = ago(new Date(each.dateTime)); }, 30_000);
setInterval(() => { if (document.hidden && document.getElementById("main").dataset.live) show(location.href).catch(() => null); }, HIDDEN_SECONDS * 1000);
document.addEventListener("visibilitychange", () => (document.hidden ? hush() : listen()));
window.addEventListener("popstate", () => show(location.href).catch(() => location.reload()));
window.addEventListener("pagehide", hush);
window.addEventListener("pageshow", (event) => { if (event.persisted) listen(); });
