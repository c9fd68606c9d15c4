// The table of jobs: what is ticked stays in the address, over all pages of the list, and its curves are drawn above.
// Without this script the table is read, filtered, sorted and sent as it is.

import { say } from "./muster.js";

const CURVES_MAX = 20; // drawn at once; a link holds more
const COLOURS = 8;
const SETTLE_MILLISECONDS = 120; // until curves are asked for: who ticks five jobs asks once
const LIVE_SECONDS = 10; // between looks at the curves of jobs that go on

const panel = document.getElementById("picked");
const chart = document.getElementById("chart");
const ticks = () => [...document.querySelectorAll("table.jobs input[name=job]")];
let names = Object.fromEntries(JSON.parse(panel.dataset.names)); // of ticked jobs by their ids, in the order of ticking
let drawn = ""; // the jobs and the chart that are drawn
let timer = null;

function inAddress() {
  return (new URLSearchParams(location.search).get("picked") ?? "").split(",").filter(Boolean);
}

// The address as it is to be, with commas as they are: people read it.
function address() {
  const query = new URLSearchParams(location.search);
  const set = (name, value) => (value ? query.set(name, value) : query.delete(name));
  set("picked", Object.keys(names).join(","));
  set("chart", chart.value === "loss" ? "" : chart.value);
  const words = query.toString().replaceAll("%2C", ",");
  return `${location.pathname}${words ? `?${words}` : ""}`;
}

function tend() {
  const ids = Object.keys(names), here = ticks();
  for (const tick of here) {
    const row = tick.closest("tr"), place = ids.indexOf(tick.value);
    tick.checked = place >= 0;
    if (place < 0) delete row.dataset.colour;
    else row.dataset.colour = place < CURVES_MAX ? (place % COLOURS) + 1 : "none";
  }
  const words = document.querySelector("[data-chosen-count]");
  if (words) {
    words.textContent = ids.length ? `${ids.length} chosen:` : "With the chosen jobs:";
    const bar = words.closest(".bulk");
    bar.classList.toggle("bulk-active", ids.length > 0);
    for (const button of bar.querySelectorAll("button")) button.disabled = ids.length === 0;
    const all = document.querySelector("[data-choose-all]"), chosen = here.filter((tick) => tick.checked).length;
    all.hidden = false;
    all.dataset.shown = "";
    all.checked = chosen > 0 && chosen === here.length;
    all.indeterminate = chosen > 0 && chosen < here.length;
    // Those of other pages are sent as well.
    const listed = new Set(here.map((tick) => tick.value));
    document.getElementById("picked-elsewhere").replaceChildren(...ids.filter((id) => !listed.has(id)).map((id) => {
      const field = document.createElement("input");
      Object.assign(field, { type: "hidden", name: "job", value: id });
      return field;
    }));
  }
  const copy = document.querySelector("[data-copy-address]");
  if (copy) {
    copy.hidden = false;
    copy.dataset.shown = "";
  }
  if (address() !== location.pathname + location.search) history.replaceState(history.state, "", address());
  panel.hidden = ids.length === 0;
  const wanted = ids.length ? `${chart.value} ${ids.slice(0, CURVES_MAX).join(",")}` : "";
  if (wanted === drawn) return;
  drawn = wanted;
  clearTimeout(timer);
  if (wanted) timer = setTimeout(draw, SETTLE_MILLISECONDS);
}

// --- Curves -----------------------------------------------------------------------------------------------------------

let loading = null;

function files() { // of charts, which a list without ticks does not need
  loading ??= Promise.all([
    ...panel.dataset.styles.trim().split(" ").map((href) => added("link", { rel: "stylesheet", href })),
    ...panel.dataset.scripts.trim().split(" ").map((src) => added("script", { src, async: false })),
  ]);
  return loading;
}

function added(tag, properties) {
  return new Promise((done, failed) => {
    const element = Object.assign(document.createElement(tag), properties);
    element.addEventListener("load", done);
    element.addEventListener("error", failed);
    document.head.append(element);
  });
}

async function draw() {
  const asked = drawn, [name, ids] = asked.split(" ");
  if (!asked) return;
  try {
    const [reply] = await Promise.all([fetch(`/jobs/curves?${new URLSearchParams({ jobs: ids, name })}`), files()]);
    if (asked !== drawn || !reply.ok || reply.redirected) return;
    const found = await reply.json();
    if (asked !== drawn) return;
    show(name, found);
    if (found.some((each) => each.live)) timer = setTimeout(later, LIVE_SECONDS * 1000);
  } catch { // the server is away, which the page says; what is drawn stays
    timer = setTimeout(later, LIVE_SECONDS * 1000);
  }
}

function later() {
  if (document.hidden) timer = setTimeout(later, LIVE_SECONDS * 1000);
  else draw();
}

function show(name, found) {
  const place = panel.querySelector("[data-curves]");
  let curves = place.querySelector("job-curves");
  if (curves?.dataset.name !== name) {
    curves = document.createElement("job-curves");
    curves.dataset.name = name;
    place.replaceChildren(curves);
  }
  const many = Object.keys(names).length;
  const title = found.length === 1 ? found[0].name : `${found.length} jobs`;
  document.getElementById("picked-title").textContent = many > CURVES_MAX ? `The first ${CURVES_MAX} of ${many} jobs` : title;
  curves.choose(found.map((each) => ({ name: each.name, curves: each.curves })));
}

// --- What is done -----------------------------------------------------------------------------------------------------

function pick(tick) {
  if (tick.checked) names[tick.value] = tick.closest("tr").dataset.name;
  else delete names[tick.value];
}

document.addEventListener("change", (event) => {
  const target = event.target;
  if (target.matches("[data-choose-all]")) {
    for (const tick of ticks()) {
      tick.checked = target.checked;
      pick(tick);
    }
  } else if (target.matches("table.jobs input[name=job]")) pick(target);
  else if (target !== chart) return;
  tend();
});

document.addEventListener("click", async (event) => {
  if (event.target.closest("[data-untick]")) {
    names = {};
    tend();
    document.querySelector("[data-choose-all]")?.focus();
  } else if (event.target.closest("[data-copy-address]")) {
    await navigator.clipboard.writeText(location.href).catch(() => null);
    say("Copied");
    const button = event.target.closest("[data-copy-address]");
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy link"; }, 1500);
  } else {
    for (const menu of document.querySelectorAll("details.menu[open]")) if (!menu.contains(event.target)) menu.open = false;
  }
});

document.addEventListener("keydown", (event) => {
  const menu = event.target.closest?.("details.menu[open]");
  if (event.key === "Escape" && menu) {
    menu.open = false;
    menu.querySelector("summary").focus();
  } else if (event.key === "Enter" && event.target.matches(".bulk input")) {
    event.preventDefault(); // the form's first button would be pressed, which compares
    event.target.parentElement.querySelector("button").click();
  }
});

document.addEventListener("submit", (event) => {
  const menu = event.target.closest("details.menu");
  if (menu) menu.open = false;
});

document.addEventListener("muster:shown", tend);
window.addEventListener("popstate", () => {
  const before = names, rows = new Map(ticks().map((tick) => [tick.value, tick.closest("tr").dataset.name]));
  names = Object.fromEntries(inAddress().map((id) => [id, before[id] ?? rows.get(id) ?? id]));
  chart.value = new URLSearchParams(location.search).get("chart") ?? "loss";
  tend();
});

tend();
