// The chat page: puts the parts together.

import { streamAnswer } from "./answer.js";
import { Composer } from "./composer.js";
import { Connection } from "./connection.js";
import { Conversation } from "./conversation.js";
import { element } from "./dom.js";
import { askForKey } from "./keyprompt.js";
import { KvBar } from "./kvbar.js";
import { Settings } from "./settings.js";
import { StartupCard } from "./startup.js";
import { Transcript } from "./transcript.js";

const DEMO_MODEL = "quire-demo";
const UNDO_MS = 8000;
const SUGGESTIONS = {
  demo: ["What is a KV cache?", "Can I run Quire without a GPU?", "Tell me a story.", "Who are you?"],
  any: [
    "Explain paged attention to a curious teenager.",
    "Write a Python function that merges two sorted lists.",
    "Plan a rainy Sunday in three steps.",
    "What makes a good error message?",
  ],
};
const OUTCOMES = { done: "Answer complete.", length: "Answer cut at the token limit.", stopped: "Stopped.", error: "" };

const CHIPS = { connecting: "connecting", loading: "loading", offline: "not connected", locked: "locked" };
const PLACEHOLDERS = {
  connecting: "Connecting",
  loading: "Write while the model loads",
  offline: "Waiting for the server",
  locked: "Waiting for the API key",
};

const byId = (id) => document.getElementById(id);

const conversation = Conversation.restore();
const settings = new Settings();
const startup = new StartupCard(() => connection.open());
const transcript = new Transcript(answerAgain);
const composer = new Composer({ send, stop });
const connection = new Connection(showConnection);
const kvbar = new KvBar(() => connection.open());

let model = null; // what GET /v1/models says of it
let running = null; // the AbortController of the answer that is being made
let undoTimer = 0;

function showConnection(state) {
  startup.show(state);
  byId("model").dataset.phase = state.phase;
  if (state.phase === "ready") showModel(state.models[0]);
  else if (!model) byId("model-name").textContent = CHIPS[state.phase];
  composer.setReady(state.phase === "ready", state.phase === "ready" ? `Ask ${shortName(model.id)}` : PLACEHOLDERS[state.phase]);
  if (state.phase === "ready") kvbar.poll();
}

/** A Hub id without its owner, a folder without those that it is in. */
function shortName(id) {
  return id.replace(/\/+$/, "").split("/").at(-1) || id;
}

function showModel(served) {
  model = served;
  const demo = model.id === DEMO_MODEL;
  byId("model-name").textContent = shortName(model.id);
  const context = model.max_model_len ? `, context of ${model.max_model_len.toLocaleString("en")} tokens` : "";
  byId("model").title = model.id + context;
  byId("demo-notice").hidden = !demo;
  byId("suggestions").replaceChildren(
    ...SUGGESTIONS[demo ? "demo" : "any"].map((text) =>
      element("button", { type: "button", class: "suggestion", onclick: () => send(text) }, text),
    ),
  );
  byId("suggestions").hidden = false;
  document.title = `${shortName(model.id)} · Quire`;
}

function showEmptiness() {
  byId("welcome").hidden = !conversation.isEmpty;
  byId("new-chat").disabled = conversation.isEmpty;
}

function announce(text) {
  byId("announcer").textContent = text;
}

function send(text) {
  if (running || !model) return;
  hideToast();
  transcript.add(conversation.ask(text));
  showEmptiness();
  answer();
}

function stop() {
  running?.abort();
}

function answerAgain() {
  if (running || !model) return;
  conversation.dropAnswer();
  transcript.dropLast();
  answer();
}

async function answer() {
  const abort = new AbortController();
  running = abort;
  const body = { model: model.id, messages: conversation.forModel(settings.systemPrompt), ...settings.sampling };
  const message = conversation.beginAnswer();
  const view = transcript.add(message);
  transcript.follow();
  composer.setBusy(true);
  kvbar.setBusy(true);
  announce("Answering.");
  try {
    await untilAuthorised(message, () =>
      streamAnswer(message, body, abort.signal, () => {
        view.update(() => transcript.keepUp());
        conversation.saveSoon();
      }),
    );
  } finally {
    // A new chat may have begun while this answer ended.
    if (running === abort) running = null;
    conversation.save();
    view.render();
    transcript.keepUp();
    composer.setBusy(running !== null);
    kvbar.setBusy(running !== null);
    announce(OUTCOMES[message.status]);
    composer.focusWithKeyboard();
  }
}

/** Runs `attempt` again with each key that the user gives; without one the message says why it failed. */
async function untilAuthorised(message, attempt) {
  for (;;) {
    try {
      return await attempt();
    } catch (error) {
      if (error.status === 401 && (await askForKey())) continue;
      message.status = "error";
      message.error = { message: error.message, status: error.status ?? 0, code: error.code ?? null };
      return undefined;
    }
  }
}

function newChat() {
  const before = conversation.messages;
  stop();
  running = null;
  conversation.replaceAll([]);
  transcript.show([]);
  showEmptiness();
  composer.setBusy(false);
  composer.focus();
  showToast("Started a new chat.", () => {
    stop();
    conversation.replaceAll(before);
    transcript.show(before);
    showEmptiness();
  });
}

function showToast(text, undo) {
  byId("toast-text").textContent = text;
  byId("toast-undo").onclick = () => {
    hideToast();
    undo();
  };
  byId("toast").hidden = false;
  clearTimeout(undoTimer);
  undoTimer = setTimeout(hideToast, UNDO_MS);
}

function hideToast() {
  clearTimeout(undoTimer);
  byId("toast").hidden = true;
}

byId("new-chat").addEventListener("click", newChat);
window.addEventListener("pagehide", () => {
  stop(); // else the browser's cutting the stream would look like the server's
  conversation.save();
});

transcript.show(conversation.messages);
showEmptiness();
composer.focusWithKeyboard();
connection.open();
