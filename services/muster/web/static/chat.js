// A conversation with a checkpoint, or with two side by side, by POST /v1/chat/completions (or /v1/completions for a
// model that only continues texts). The second is asked when the first begins to answer, and both write as they go; where
// the server holds one model at a time the second says that it waits.

import { endSession, say } from "./muster.js";

const chat = document.querySelector("[data-chat]");

const LOADS = "Loading the model …";
const WAITS = "Waits for the other answer: this server holds one model at a time (MUSTER_API_CHAT_WORKERS).";

class Pane {
  constructor(step, title) {
    this.step = step;
    this.messages = [];
    this.log = element("div", "chat-log");
    this.log.tabIndex = 0;
    this.log.setAttribute("role", "log");
    this.log.setAttribute("aria-label", `Conversation with ${title}`);
    this.box = element("section", "chat-pane");
    this.box.append(element("h3", "", title), this.log);
  }

  add(role, words) {
    const turn = element("p", `turn turn-${role}`, words);
    this.log.append(turn);
    this.log.scrollTop = this.log.scrollHeight;
    return turn;
  }

  // Ask once `before` is over, and write the answer as it comes; `begins` is called when it does, or never will.
  async ask(words, options, signal, before, begins) {
    const turn = this.add("assistant waiting", before ? WAITS : LOADS);
    this.messages.push({ role: "user", content: words });
    let answer = "";
    try {
      if (before) {
        begins();
        await before;
        if (signal.aborted) throw new Error();
        turn.textContent = LOADS;
      }
      const reply = await this.send(words, options, signal);
      begins();
      if (reply.status === 401) endSession();
      if (!reply.ok) throw new Error((await reply.json().catch(() => null))?.error?.message ?? `The server answered with status ${reply.status}.`);
      for await (const chunk of chunks(reply)) {
        if (chunk.error) throw new Error(chunk.error.message);
        answer += chunk.choices[0]?.delta?.content ?? chunk.choices[0]?.text ?? "";
        if (!answer) continue;
        const atEnd = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 40;
        turn.className = "turn turn-assistant";
        turn.textContent = answer;
        if (atEnd) this.log.scrollTop = this.log.scrollHeight;
      }
      turn.className = "turn turn-assistant";
      if (!answer) turn.textContent = "(It ended at once, without a word.)";
      this.messages.push({ role: "assistant", content: answer });
    } catch (error) {
      this.messages.pop();
      if (!answer) turn.remove();
      if (signal.aborted) return;
      this.add("fault", error instanceof TypeError ? "The server does not answer. Try again." : error.message);
    } finally {
      begins();
    }
  }

  send(words, options, signal) {
    const question = options.chats ? { messages: this.messages } : { prompt: words };
    return fetch(options.chats ? "/v1/chat/completions" : "/v1/completions", {
      method: "POST", signal, headers: { "content-type": "application/json", "x-muster-form": options.token },
      body: JSON.stringify({ ...question, ...options.sampling, stream: true, model: `job:${options.job}:ckpt-step-${this.step}` }),
    });
  }
}

function element(tag, name, words = "") {
  const made = document.createElement(tag);
  made.className = name;
  made.textContent = words;
  return made;
}

// The data of server-sent events, until [DONE].
async function* chunks(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      if (line === "data: [DONE]") return;
      yield JSON.parse(line.slice(6));
    }
  }
}

function begin() {
  const { step, other, temperature, tokens, words, form_token: token } = chat.elements;
  const { job, mode } = document.getElementById("chat").dataset;
  const models = Number(document.getElementById("chat").dataset.models); // that the server holds at a time
  const holder = chat.querySelector(".chat-panes"), stop = chat.querySelector("[data-chat-stop]");
  const send = chat.querySelector("button.primary");
  let panes = [], asking = null;

  // A conversation belongs to its checkpoint: with another one it begins anew.
  function lay() {
    asking?.abort();
    panes = [step, other].filter((each) => each.value).map((each) => new Pane(each.value, each.selectedOptions[0].textContent));
    holder.replaceChildren(...panes.map((pane) => pane.box));
  }

  async function ask() {
    const said = mode === "chat" ? words.value.trim() : words.value; // a blank at the end is part of a text
    if (!said.trim() || asking) return;
    asking = new AbortController();
    const mine = asking, signal = mine.signal;
    words.value = "";
    send.disabled = true;
    stop.hidden = false;
    const options = { job, chats: mode === "chat", token: token.value,
      sampling: { temperature: Number(temperature.value), max_tokens: Number(tokens.value) } };
    for (const pane of panes) pane.add("user", said);
    const answers = [];
    for (const pane of panes) {
      if (signal.aborted) break;
      const before = answers.length && models < 2 ? Promise.allSettled([...answers]) : null;
      await new Promise((begins) => answers.push(pane.ask(said, options, signal, before, begins)));
    }
    await Promise.all(answers);
    // The model that answered last is the one that is loaded: the next question begins there.
    panes = [...panes].reverse();
    if (asking === mine) asking = null;
    send.disabled = false;
    stop.hidden = true;
    if (!signal.aborted) say("The answer is there.");
    words.focus();
  }

  chat.hidden = false;
  document.querySelector("[data-without-scripts]").hidden = true;
  lay();
  step.addEventListener("change", lay);
  other.addEventListener("change", lay);
  stop.addEventListener("click", () => asking?.abort());
  chat.querySelector("[data-chat-clear]").addEventListener("click", lay);
  chat.addEventListener("submit", (event) => {
    event.preventDefault();
    event.stopPropagation(); // this form is asked by script, and never sent
    ask();
  });
  words.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (chat.reportValidity()) ask();
  });
}

if (chat) begin();
