// Completes keys and values of a job's YAML under the caret: while a word is typed, or anywhere by Ctrl+Space.
// What there is to complete comes from the schema that the operator checks by (job-keys.json).

import { say } from "./muster.js";

const SHOWN_MAX = 60;
const KEY = /^(\s*(?:- )*)(?:["']?)([\w./-]+)(?:["']?)\s*:(?=\s|$)/;

let tree = null;
const loading = fetch(new URL("./job-keys.json", import.meta.url)).then((reply) => reply.json()).then((read) => { tree = read; });

// Where the caret stands: the keys that lead there, the word before it, and whether a value is wanted.
export function placeAt(text, caret) {
  const lines = text.slice(0, caret).split("\n");
  const line = lines.pop();
  if (/(^|\s)#/.test(line)) return null;
  const inFlow = flow(line);
  const path = [];
  let indent = /^\s*/.exec(line)[0].length;
  const dashes = /^\s*((?:- )*)/.exec(line)[1].length;
  if (dashes && !inFlow.keys.length) indent += dashes;
  for (let i = lines.length - 1; i >= 0 && indent > 0; i -= 1) {
    const found = KEY.exec(lines[i]);
    if (!found) continue;
    const column = found[1].length, bare = /^\s*/.exec(found[1])[0].length;
    // Keys of a list's item stand to the right of its dash, and those of a list may stand below their key.
    if (column < indent || (dashes && path.length === 0 && column <= indent - dashes && lines[i].trimEnd().endsWith(":"))) {
      path.unshift(found[2]);
      indent = bare;
    }
  }
  return { path: [...path, ...inFlow.keys], word: inFlow.word, value: inFlow.value, flow: inFlow.depth > 0, indent: /^\s*(?:- )*/.exec(line)[0].length };
}

// The keys that are open on this line, such as `train` and then nothing in `  train: [{source: x, fo`.
function flow(line) {
  const start = /^\s*(?:- )*/.exec(line)[0].length;
  const open = [];
  let word = "", key = "", value = false;
  for (const sign of line.slice(start)) {
    if (sign === "{" || sign === "[") {
      open.push(key);
      [word, key, value] = ["", "", sign === "[" && value];
    } else if (sign === "}" || sign === "]") {
      key = open.pop() ?? "";
      word = "";
    } else if (sign === ",") {
      [word, value] = ["", false];
      key = "";
    } else if (sign === ":" ) {
      [key, word, value] = [word.trim(), "", true];
    } else {
      word += sign;
    }
  }
  const keys = open.filter(Boolean);
  return { keys: value && key ? [...keys, key] : keys, word: word.trimStart(), value: value && Boolean(key), depth: open.length };
}

export function choices(place) {
  let node = tree;
  for (const key of place.path) node = node?.keys?.[key];
  if (!node) return [];
  const word = place.word.toLowerCase();
  const all = place.value
    ? (node.values ?? []).map((name) => ({ name, about: "" }))
    : Object.entries(node.keys ?? {}).map(([name, { about = "", keys }]) => ({ name, about, opens: Boolean(keys) }));
  const fits = all.filter(({ name }) => name.toLowerCase().includes(word) && name !== place.word);
  const rank = ({ name }) => (name.toLowerCase().startsWith(word) ? 0 : 1);
  return fits.sort((a, b) => rank(a) - rank(b)).slice(0, SHOWN_MAX);
}

export function completes(text, holder) {
  const list = document.createElement("ul");
  Object.assign(list, { id: "completions", className: "completions", hidden: true });
  list.setAttribute("role", "listbox");
  list.setAttribute("aria-label", "Completions");
  holder.append(list);
  text.setAttribute("aria-autocomplete", "list");
  text.setAttribute("aria-controls", list.id);
  let found = [], at = 0, place = null;

  const close = () => {
    list.hidden = true;
    text.removeAttribute("aria-activedescendant");
  };

  const choose = (index) => {
    at = (index + found.length) % found.length;
    for (const [i, item] of [...list.children].entries()) item.setAttribute("aria-selected", String(i === at));
    list.children[at].scrollIntoView({ block: "nearest" });
    text.setAttribute("aria-activedescendant", list.children[at].id);
  };

  const open = async (asked) => {
    await loading;
    place = text.selectionStart === text.selectionEnd ? placeAt(text.value, text.selectionStart) : null;
    found = place && (asked || place.word) ? choices(place) : [];
    if (!found.length) return close();
    list.replaceChildren(...found.map(({ name, about }, index) => {
      const item = document.createElement("li"), key = document.createElement("strong"), words = document.createElement("span");
      Object.assign(item, { id: `completion-${index}` });
      item.setAttribute("role", "option");
      item.dataset.index = index;
      key.textContent = name;
      words.textContent = about;
      item.append(key, words);
      return item;
    }));
    list.hidden = false;
    put();
    choose(0);
    say(`${found.length} ${found.length === 1 ? "completion" : "completions"}`);
  };

  // Below the word, or above it where there is no room.
  const put = () => {
    const style = getComputedStyle(text), height = Number.parseFloat(style.lineHeight);
    const lines = text.value.slice(0, text.selectionStart).split("\n");
    const probe = document.createElement("span");
    Object.assign(probe, { className: "probe", textContent: "x".repeat(lines.at(-1).length - place.word.length) });
    holder.append(probe);
    const left = Number.parseFloat(style.paddingLeft) + probe.getBoundingClientRect().width - text.scrollLeft;
    probe.remove();
    const below = Number.parseFloat(style.paddingTop) + lines.length * height - text.scrollTop + 2;
    list.style.left = `${Math.max(0, Math.min(left, text.clientWidth - list.offsetWidth - 4))}px`;
    const above = below - height - list.offsetHeight - 4;
    list.style.top = `${below + list.offsetHeight > text.clientHeight && above > 0 ? above : below}px`;
  };

  const take = () => {
    const { name, opens } = found[at];
    const begin = text.selectionStart - place.word.length;
    const after = text.value.slice(text.selectionStart);
    const more = place.value || after.startsWith(":") ? "" : opens && !place.flow ? `:\n${" ".repeat(place.indent + 2)}` : ": ";
    text.setRangeText(name + more, begin, text.selectionStart, "end");
    close();
    text.dispatchEvent(new Event("input", { bubbles: true }));
    close();
  };

  text.addEventListener("input", (event) => { if (event.isTrusted) open(false); });
  text.addEventListener("keydown", (event) => {
    if (event.key === " " && event.ctrlKey) {
      event.preventDefault();
      return void open(true);
    }
    if (list.hidden) return;
    const moves = { ArrowDown: () => choose(at + 1), ArrowUp: () => choose(at - 1), Enter: take, Tab: take, Escape: close };
    if (!moves[event.key] || event.shiftKey) return void (["ArrowLeft", "ArrowRight", "Home", "End"].includes(event.key) && close());
    event.preventDefault();
    moves[event.key]();
  });
  list.addEventListener("mousedown", (event) => {
    event.preventDefault(); // the caret stays in the text
    const item = event.target.closest("li");
    if (!item) return;
    choose(Number(item.dataset.index));
    take();
  });
  text.addEventListener("blur", close);
  text.addEventListener("scroll", () => { if (!list.hidden) put(); });
}
