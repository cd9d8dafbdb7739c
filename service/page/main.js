// The chat page: puts the parts together.

import { streamAnswer } from "./answer.js";
import { ChatsPanel } from "./chats.js";
import { Composer } from "./composer.js";
import { Connection } from "./connection.js";
import { element } from "./dom.js";
import { askForKey } from "./keyprompt.js";
import { KvBar } from "./kvbar.js";
import { Library } from "./library.js";
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

const library = new Library({
  full: () => showToast("The browser's storage is full: delete a chat, or export them.", null),
  elsewhere: showElsewhere,
});
const settings = new Settings((refusal) => showToast(refusal, null));
const startup = new StartupCard(() => connection.open());
const transcript = new Transcript({
  again: answerAgain,
  edit: askInstead,
  show: showBranch,
  alternatives: (message) => library.current.alternatives(message),
  isWritten: (message) => library.current.isWritten(message),
});
const composer = new Composer({ send, stop, changed: keepDraft });
const connection = new Connection(showConnection);
const kvbar = new KvBar(() => connection.open());
const chats = new ChatsPanel(library, chatChanged);

let model = null; // what GET /v1/models says of it
let running = null; // {message, abort}: the answer that is being made, and its AbortController
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
  byId("welcome").hidden = !library.current.isEmpty;
  byId("new-chat").disabled = library.current.isEmpty;
}

function announce(text) {
  byId("announcer").textContent = text;
}

function send(text) {
  if (running || !model) return;
  hideToast();
  transcript.add(library.current.ask(text));
  showEmptiness();
  answer();
}

/** A question in place of an earlier one, which stays in a branch of its own. */
function askInstead(message, text) {
  if (running || !model) return;
  library.current.ask(text, message);
  transcript.show(library.current.branch);
  answer();
}

function showBranch(message) {
  if (running) return;
  library.current.show(message);
  library.saveNow();
  transcript.show(library.current.branch);
}

/** While an answer comes there is nothing to edit, and no other branch to show. */
function setBusy(busy) {
  composer.setBusy(busy);
  kvbar.setBusy(busy);
  byId("messages").classList.toggle("busy", busy);
}

function stop() {
  running?.abort.abort();
}

function keepDraft(text) {
  library.draft = text;
}

function answerAgain() {
  if (running || !model) return;
  library.current.leaveAnswer();
  transcript.show(library.current.branch);
  answer();
}

async function answer() {
  const abort = new AbortController();
  const conversation = library.current;
  const body = { model: model.id, messages: conversation.forModel(settings.systemPrompt), ...settings.sampling };
  const message = conversation.beginAnswer();
  running = { message, abort };
  library.saveNow();
  const view = transcript.add(message);
  transcript.follow();
  setBusy(true);
  announce("Answering.");
  try {
    await untilAuthorised(message, () =>
      streamAnswer(message, body, abort.signal, () => {
        view.update(() => transcript.keepUp());
        library.saveSoon();
      }),
    );
  } finally {
    // A new chat may have begun while this answer ended.
    if (running?.message === message) running = null;
    if (conversation === library.current) library.saveNow();
    view.render();
    transcript.keepUp();
    setBusy(running !== null);
    announce(message.status === "done" && message.content === "" ? "No text." : OUTCOMES[message.status]);
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
  library.begin();
  chatChanged();
  composer.focus();
}

/** Another conversation is current. `undo`: one was deleted, and comes back by it. */
function chatChanged(undo = null) {
  stop();
  running = null;
  composer.text = library.draft;
  hideToast();
  transcript.show(library.current.branch);
  showEmptiness();
  setBusy(false);
  if (undo) {
    showToast("Deleted the chat.", () => {
      undo();
      chatChanged();
    });
  }
}

/** Another tab has changed the conversation that is shown ("current"), or "deleted" it, or changed some "other". */
function showElsewhere(what) {
  chats.refresh();
  if (what === "current") {
    transcript.update(library.current.branch);
    showEmptiness();
  } else if (what === "deleted") {
    // What was being written here goes into the new chat, after what may wait there.
    library.draft = [library.draft, composer.text].filter((text) => text !== "").join("\n\n");
    chatChanged();
    showToast("This chat was deleted in another tab.", null);
  }
}

function showToast(text, undo) {
  byId("toast-text").textContent = text;
  byId("toast-undo").hidden = undo === null;
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
  // Else the browser's cutting the stream would look like the server's, and to other tabs as if it went on.
  if (running) running.message.status = "stopped";
  stop();
  library.saveNow();
});

transcript.show(library.current.branch);
showEmptiness();
composer.text = library.draft;
composer.focusWithKeyboard();
connection.open();
