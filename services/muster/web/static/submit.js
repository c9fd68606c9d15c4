// The page for submitting: the form writes the YAML, faults are shown at their lines while one types, files are
// uploaded by dropping them, and what was typed outlives a reload and a session. The server writes, checks and shows
// the plan: this script asks for the page as its buttons would, and takes what it needs of the answer.

import { completes } from "./complete.js";
import { endSession, say } from "./muster.js";

const CHECK_MILLISECONDS = 400; // after the last key
const PART_BYTES = 4 << 20; // of a file, sent at a time: what is lost when a connection breaks
const TRIES = 6; // of one part, with longer and longer pauses
const KEPT = `muster-typed:${location.pathname}${location.search}`;

const form = document.getElementById("submit-form");
const text = document.getElementById("document");
const fields = document.getElementById("fields");
const token = () => form.elements.form_token.value;

// --- What was typed stays ---------------------------------------------------------------------------------------------

let byHand = false; // the YAML has words that the form did not write

function keep() {
  const values = {};
  for (const each of form.elements) {
    if (!each.name || ["form_token", "verb", "cloned"].includes(each.name)) continue;
    if (each.type !== "radio" || each.checked) values[each.name] = each.value;
  }
  try { sessionStorage.setItem(KEPT, JSON.stringify({ values, byHand })); } catch { /* a browser that keeps nothing */ }
}

function kept() {
  try { return JSON.parse(sessionStorage.getItem(KEPT)); } catch { return null; } // nothing, or nothing of ours
}

// Of a select, a group of radio buttons or a field: it is not as the server sent it.
function changed(field) {
  if (field instanceof RadioNodeList) return [...field].some((each) => each.checked !== each.defaultChecked);
  if (field.options) return field.selectedIndex !== Math.max(0, [...field.options].findIndex((each) => each.defaultSelected));
  return field.value !== field.defaultValue;
}

// The key too: the same text is the same job, also by the browser's Back. What was typed while this script was still on
// its way, or put back by the browser, stays.
function restore({ values, byHand: changedByHand }) {
  const fresh = values.document !== text.value;
  for (const [name, value] of Object.entries(values)) {
    const field = form.elements[name];
    if (field && !changed(field)) field.value = value; // of radio buttons it ticks the one with this value
  }
  byHand = changedByHand;
  document.getElementById("kept").hidden = !fresh;
  if (fresh) ask("check");
}

// Names of fields that were filled in before this script listened to them.
function typedEarly(values) {
  const names = new Set([...form.elements].map((each) => each.name).filter((name) => name && name !== "verb"));
  return [...names].filter((name) => changed(form.elements[name]) && form.elements[name].value !== values[name]);
}

function startAfresh() {
  try { sessionStorage.removeItem(KEPT); } catch { /* likewise */ }
  location.replace(location.pathname + location.search);
}

// --- What the server makes of it --------------------------------------------------------------------------------------

let asking = null;
let waiting = null;

async function ask(verb) {
  clearTimeout(waiting);
  asking?.abort();
  const mine = (asking = new AbortController());
  document.getElementById("plan").setAttribute("aria-busy", "true");
  const body = new URLSearchParams([...new FormData(form), ["verb", verb]]), before = text.value;
  try {
    const reply = await fetch("/submit", { method: "POST", body, headers: { accept: "text/html" }, signal: mine.signal });
    if (reply.status === 401) return endSession();
    if (!reply.ok) return;
    const page = new DOMParser().parseFromString(await reply.text(), "text/html");
    if (mine.signal.aborted) return;
    if (verb === "write" && text.value !== before) return; // typed meanwhile: it stays, and is about to be checked
    if (verb === "write") {
      text.value = page.getElementById("document").value;
      byHand = false;
      keep();
    }
    const plan = page.getElementById("plan");
    document.getElementById("plan").replaceChildren(...plan.childNodes);
    text.toggleAttribute("aria-invalid", false);
    if (page.getElementById("document").hasAttribute("aria-invalid")) text.setAttribute("aria-invalid", "true");
    say(document.querySelector("#plan h2").textContent);
    show();
  } catch (error) {
    if (error.name !== "AbortError") say("The server does not answer; what you typed stays.");
  } finally {
    if (asking === mine) document.getElementById("plan").removeAttribute("aria-busy");
  }
}

function askSoon(verb) {
  clearTimeout(waiting);
  waiting = setTimeout(() => ask(verb), CHECK_MILLISECONDS);
}

// --- Lines and their faults -------------------------------------------------------------------------------------------

const gutter = document.createElement("pre");
gutter.className = "gutter";
gutter.setAttribute("aria-hidden", "true");
const marks = document.createElement("div");
marks.className = "marks";
marks.setAttribute("aria-hidden", "true");
document.getElementById("editor").append(gutter, marks);
document.getElementById("editor").classList.add("with-lines");

// A text that ends too early has its fault on the line after the last.
function faultsByLine(lines) {
  const found = new Map();
  for (const each of document.querySelectorAll("#faults [data-line]")) {
    const line = Math.min(Number(each.dataset.line), lines.length);
    const key = each.querySelector("code")?.textContent.split(".").at(-1);
    const words = each.querySelector(".fault-words").textContent;
    if (!found.has(line)) found.set(line, key ? `${key}: ${words}` : words);
  }
  return found;
}

function show() {
  const lines = text.value.split("\n");
  const faults = faultsByLine(lines);
  gutter.replaceChildren(...lines.map((_, index) => {
    const number = document.createElement("span");
    number.textContent = `${index + 1}\n`;
    if (faults.has(index + 1)) number.className = "bad";
    return number;
  }));
  const height = Number.parseFloat(getComputedStyle(text).lineHeight);
  marks.replaceChildren(...[...faults].map(([line, words]) => {
    const mark = document.createElement("div");
    mark.className = "mark";
    mark.style.top = `${(line - 1) * height}px`;
    mark.style.paddingLeft = `${(lines[line - 1] ?? "").length + 2}ch`;
    mark.textContent = words;
    return mark;
  }));
  scroll();
  document.getElementById("edited")?.toggleAttribute("hidden", !byHand);
}

function scroll() {
  gutter.scrollTop = text.scrollTop;
  marks.style.transform = `translate(${-text.scrollLeft}px, ${-text.scrollTop}px)`;
}

function goTo(line) {
  const before = text.value.split("\n").slice(0, line - 1).join("\n").length;
  const begin = line > 1 ? before + 1 : 0;
  const end = text.value.indexOf("\n", begin);
  text.focus();
  text.setSelectionRange(begin, end < 0 ? text.value.length : end);
  const height = Number.parseFloat(getComputedStyle(text).lineHeight);
  text.scrollTop = Math.max(0, (line - 6) * height);
}

// --- Files ------------------------------------------------------------------------------------------------------------

const pause = (seconds) => new Promise((done) => setTimeout(done, seconds * 1000));
const inBase64 = (words) => btoa(String.fromCharCode(...new TextEncoder().encode(words)));

async function send(address, options, headers) {
  const reply = await fetch(address, { ...options, headers: { accept: "application/json", "x-muster-form": token(), "tus-resumable": "1.0.0", ...headers } });
  if (reply.status === 401) endSession();
  if (reply.ok) return reply;
  const refusal = await reply.json().catch(() => ({}));
  throw Object.assign(new Error(refusal.detail ?? `The server answered ${reply.status}.`), { refused: reply.status < 500 && ![401, 409, 423, 429].includes(reply.status) });
}

// By tus: what has arrived stays when the connection breaks, and the rest is sent from there.
async function sendParts(address, file, progress) {
  let offset = 0;
  for (let tried = 0; offset < file.size;) {
    try {
      if (tried) offset = Number((await send(address, { method: "HEAD" }, {})).headers.get("upload-offset"));
      if (offset >= file.size) break;
      const headers = { "upload-offset": String(offset), "content-type": "application/offset+octet-stream" };
      const reply = await send(address, { method: "PATCH", body: file.slice(offset, offset + PART_BYTES) }, headers);
      offset = Number(reply.headers.get("upload-offset"));
      tried = 0;
      progress(offset);
    } catch (error) {
      if (error.refused || ++tried >= TRIES) throw error;
      await pause(2 ** tried / 2);
    }
  }
}

async function settled(address) {
  for (;;) {
    const file = await (await send(address, {}, {})).json();
    if (file.status !== "checking" && file.status !== "uploading") return file;
    await pause(0.5);
  }
}

function row(file) {
  const item = document.createElement("li");
  const name = document.createElement("strong");
  name.textContent = file.name;
  const bar = document.createElement("progress");
  bar.max = Math.max(1, file.size);
  bar.value = 0;
  bar.setAttribute("aria-label", `Upload of ${file.name}`);
  const words = document.createElement("span");
  words.className = "small muted";
  item.append(name, bar, words);
  document.getElementById("uploads").append(item);
  return { bar, words, item };
}

async function upload(file) {
  const shown = row(file);
  const project = form.elements.project?.value;
  const said = { filename: file.name, purpose: "fine-tune", ...(project ? { project } : {}) };
  const metadata = Object.entries(said).map(([key, value]) => `${key} ${inBase64(value)}`).join(",");
  try {
    const begun = await send("/api/v1/files", { method: "POST" }, { "upload-length": String(file.size), "upload-metadata": metadata });
    const { id } = await begun.json();
    const address = `/api/v1/files/${id}`;
    await sendParts(address, file, (bytes) => {
      shown.bar.value = bytes;
      shown.words.textContent = `${Math.floor(100 * bytes / file.size)}%`;
    });
    shown.words.textContent = "is being read through";
    take(id);
    const found = await settled(address);
    if (found.status === "failed") throw new Error(found.fault);
    shown.words.textContent = `${id}${found.samples == null ? "" : ` · ${found.samples.toLocaleString()} samples`}${found.format ? ` · ${found.format}` : ""}`;
    say(`${file.name} is uploaded`);
    await ask(byHand ? "check" : "write"); // the file is ready, and the YAML may not name it yet
  } catch (error) {
    shown.words.textContent = error.message;
    shown.words.className = "small bad-text";
    say(`${file.name}: ${error.message}`);
  }
  shown.bar.remove();
}

// The document names the file by its id: in the form's field, and where the YAML was changed by hand, in place of what
// that field held.
function take(id) {
  const before = form.elements.data.value;
  form.elements.data.value = id;
  if (!byHand) return askSoon("write");
  if (before && text.value.includes(before)) text.value = text.value.replaceAll(before, () => id);
  keep();
  show();
}

// --- Begin ------------------------------------------------------------------------------------------------------------

for (const each of document.querySelectorAll("[data-dropping]")) each.hidden = false;
document.querySelector("[data-afresh]").addEventListener("click", startAfresh);

text.addEventListener("input", () => { byHand = true; keep(); show(); askSoon("check"); });
text.addEventListener("scroll", scroll);
new ResizeObserver(scroll).observe(text);
completes(text, document.getElementById("editor"));

fields?.addEventListener("input", (event) => {
  if (event.target.type === "file") return;
  keep();
  if (!byHand) askSoon("write");
});
document.getElementById("write")?.addEventListener("click", (event) => { event.preventDefault(); ask("write"); });
document.getElementById("check").addEventListener("click", (event) => { event.preventDefault(); ask("check"); });
document.getElementById("plan").addEventListener("click", (event) => {
  const fault = event.target.closest("a[href='#document']")?.closest("[data-line]");
  if (!fault) return;
  event.preventDefault();
  goTo(Number(fault.dataset.line));
});

const file = document.getElementById("file");
const uploadChosen = () => { for (const each of file.files) upload(each); file.value = ""; };
file?.addEventListener("change", uploadChosen);
if (fields) {
  const holds = (event) => event.dataTransfer?.types.includes("Files");
  document.addEventListener("dragover", (event) => { if (holds(event)) { event.preventDefault(); fields.open = true; form.classList.add("dropping"); } });
  document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) form.classList.remove("dropping"); });
  document.addEventListener("drop", (event) => {
    form.classList.remove("dropping");
    if (!holds(event)) return;
    event.preventDefault();
    for (const each of event.dataTransfer.files) upload(each);
  });
}

form.addEventListener("submit", () => {
  keep();
  document.getElementById("submit").setAttribute("aria-busy", "true");
});
window.addEventListener("pageshow", () => document.getElementById("submit").removeAttribute("aria-busy"));

const before = kept();
const early = typedEarly(before?.values ?? {});
byHand = before?.byHand ?? (text.value !== "" && !text.hasAttribute("data-by-form"));
if (text.hasAttribute("data-sent") || !before?.values) keep();
else restore(before);
if (early.length) {
  byHand ||= early.includes("document");
  keep();
  ask(byHand ? "check" : "write");
}
if (file) uploadChosen();
show();
