// Tells by the browser when a job of an open page ends or needs somebody, where that was asked for by the bell.

import { say } from "./muster.js";

const KEPT = "muster-notify";
const TOLD = { // what somebody who does not look wants to know
  Succeeded: "has succeeded", Failed: "has failed", Cancelled: "is cancelled", Suspended: "is suspended, and waits to be resumed",
};

const bell = document.querySelector("[data-notify]");
const wanted = () => localStorage.getItem(KEPT) === "on" && Notification.permission === "granted";

function seen() {
  return new Map([...document.querySelectorAll("[data-job][data-phase]")].map(({ dataset }) => [dataset.job, dataset]));
}

let before = phases();

function phases() {
  return new Map([...seen()].map(([job, { phase }]) => [job, phase]));
}

function compare() {
  const now = seen();
  if (wanted()) {
    for (const [job, { phase, name, because }] of now) {
      if (before.has(job) && before.get(job) !== phase && TOLD[phase]) tell(job, `${name} ${TOLD[phase]}`, because ?? "");
    }
  }
  before = new Map([...before, ...phases()]);
}

function tell(job, title, body) {
  const told = new Notification(title, { body, tag: job, icon: document.querySelector("link[rel=icon]").href });
  told.onclick = () => {
    window.focus();
    const address = `/jobs/${encodeURIComponent(job)}`;
    if (location.pathname !== address) location.assign(address);
    told.close();
  };
}

function showBell() {
  bell.setAttribute("aria-pressed", String(wanted()));
  bell.title = wanted() ? "You are told when a job of this page ends or needs you" : "Tell me when a job of this page ends or needs me";
}

async function toggle() {
  if (wanted()) {
    localStorage.removeItem(KEPT);
    say("Notifications are off");
  } else if (await Notification.requestPermission() === "granted") {
    localStorage.setItem(KEPT, "on");
    say("Notifications are on");
  } else {
    say("The browser does not let this site notify: allow it in the site's settings");
  }
  showBell();
}

if (bell && "Notification" in window) {
  bell.hidden = false;
  bell.addEventListener("click", toggle);
  document.addEventListener("muster:shown", compare);
  window.addEventListener("storage", showBell);
  showBell();
}
