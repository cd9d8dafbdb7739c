// The chat page: puts the parts together.

import { Answers } from "./answers.js";
import { onlyContinues } from "./api.js";
import { ChatsPanel } from "./chats.js";
import { shortName, showState, showUse } from "./chip.js";
import { Composer } from "./composer.js";
import { Connection } from "./connection.js";
import { element } from "./dom.js";
import { KvBar } from "./kvbar.js";
import { Library } from "./library.js";
import { Settings } from "./settings.js";
import { StartupCard } from "./startup.js";
import { load, save } from "./storage.js";
import { newStreamId } from "./stream.js";
import { hideToast, showNotice, showToast } from "./toast.js";
import { Transcript } from "./transcript.js";

const DEMO_MODEL = "quire-demo";
const DEFAULTS = "quire.settings"; // of chats that are still to begin
const SUGGESTIONS = {
  demo: ["What is a KV cache?", "Can I run Quire without a GPU?", "Tell me a story.", "Who are you?"],
  any: [
    "Explain paged attention to a curious teenager.",
    "Write a Python function that merges two sorted lists.",
    "Plan a rainy Sunday in three steps.",
    "What makes a good error message?",
  ],
  continues: ["Once upon a time", "The three laws of thermodynamics are", "def fibonacci(n):", "Dear Sir or Madam,"],
};
const OUTCOMES = {
  done: "Answer complete.",
  length: "Answer cut at the token limit.",
  stopped: "Stopped.",
  cut: "The answer was cut off.",
};
const UNKEPT = {
  full: "The browser's storage is full: what is new stays in this tab only. Export the chats, or delete some.",
  forbidden: "The browser lets this page keep nothing: all chats stay in this tab only. Export those that you want to keep.",
};
const PLACEHOLDERS = {
  connecting: "Connecting",
  loading: "Write while the model loads",
  offline: "Waiting for the server",
  locked: "Waiting for the API key",
};

const byId = (id) => document.getElementById(id);

const library = new Library({
  kept: (problem) => showNotice(UNKEPT[problem] ?? ""),
  elsewhere: showElsewhere,
});
const answers = new Answers(library, {
  reads: ({ id }) => id === library.current.id && showAround(),
  begun: () => chats.update(),
  changed: showChange,
  ended: showEnd,
});
const settings = new Settings({ refused: (refusal) => showToast(refusal), changed: keepSettings });
const startup = new StartupCard(() => connection.open());
const transcript = new Transcript({
  again: answerAgain,
  goOn,
  edit: askInstead,
  editLast: () => transcript.viewOf(library.current.branch.findLast(({ role }) => role === "user")).edit(),
  begin: newChat,
  show: showBranch,
  alternatives: (message) => library.current.alternatives(message),
  isWritten: (message) => library.current.isWritten(message),
  isShown: (message) => library.current.branch.includes(message),
  canGoOn: () => !library.current.settings?.json,
});
const composer = new Composer({ send: sendWritten, stop: () => answers.stop(library.current.id), changed: keepDraft });
const connection = new Connection(showConnection);
const kvbar = new KvBar(() => connection.open(), ownRequests);
const chats = new ChatsPanel(library, chatChanged);

let unkept = null; // the settings of chats that are still to begin, where the browser did not keep them
let model = null; // what GET /v1/models says of it, and whether it `continues` texts

async function showConnection(state) {
  let { phase } = state;
  if (phase === "ready") {
    try {
      model = { ...state.models[0], continues: await onlyContinues(state.models[0].id) };
    } catch {
      phase = "connecting"; // lost again; the map of the cache notices
    }
  }
  startup.show({ ...state, phase });
  showState(phase, model);
  if (phase === "ready") showModel();
  composer.setReady(phase === "ready", phase === "ready" ? invitation() : PLACEHOLDERS[phase]);
  if (state.phase === "ready") kvbar.follow();
}

function invitation() {
  return model.continues ? `Text for ${shortName(model.id)} to continue` : `Ask ${shortName(model.id)}`;
}

function showModel() {
  const demo = model.id === DEMO_MODEL;
  byId("demo-notice").hidden = !demo;
  byId("base-notice").hidden = !model.continues;
  byId("welcome-title").textContent = model.continues ? "Begin a text, and watch the memory" : "Ask away, and watch the memory";
  byId("suggestions").replaceChildren(
    ...SUGGESTIONS[demo ? "demo" : model.continues ? "continues" : "any"].map((text) =>
      element("button", { type: "button", class: "suggestion", onclick: () => send(text) }, text),
    ),
  );
  byId("suggestions").hidden = false;
  document.title = `${shortName(model.id)} · Quire`;
  showUse(model, library.current.branch);
  for (const conversation of library.all()) answers.adopt(conversation);
}

/** What belongs to the current conversation, but for its messages. */
function showAround() {
  byId("welcome").hidden = !library.current.isEmpty;
  byId("new-chat").disabled = library.current.isEmpty;
  const busy = answers.isReading(library.current);
  composer.setBusy(busy);
  byId("messages").classList.toggle("busy", busy); // then there is nothing to edit, and no other branch to show
  showUse(model, library.current.branch);
  kvbar.look();
  if (library.current.isEmpty) settings.show(defaults(), "For new chats.");
  else settings.show(library.current.settings ?? {}, "For this chat.");
}

/** The requests of the last answers: what they were asked has all that was said before. */
function ownRequests() {
  return [...new Set((library.current.rows.at(-1) ?? []).map(({ request }) => request).filter(Boolean))];
}

function announce(text) {
  byId("announcer").textContent = text;
}

function isReady() {
  return model !== null && !answers.isReading(library.current);
}

/** What was written is no draft once it is sent. Returns whether it is. */
function sendWritten(text) {
  if (!isReady()) return false;
  library.draft = ""; // before the chat begins, which has another one
  send(text);
  return true;
}

function send(text) {
  if (!isReady()) return;
  hideToast();
  if (library.current.isEmpty) library.current.settings = defaults();
  library.current.ask(text);
  answer();
}

/** A question in place of an earlier one, which stays in a branch of its own. */
function askInstead(message, text) {
  if (!isReady()) return;
  library.current.ask(text, message);
  answer();
  composer.focusWithKeyboard(); // the form that had the focus is gone
}

function answerAgain() {
  if (!isReady()) return;
  library.current.leaveAnswer();
  answer();
}

/**
 * Samples share a stream, for a browser has six connections for each server. A text to continue has to say how long it
 * may become, which for several at once only the server knows: there each has a stream.
 */
function answer() {
  const samples = library.current.settings?.samples ?? 1;
  const stream = newStreamId();
  begin(library.current.beginAnswers(Array.from({ length: samples }, () => (model.continues ? newStreamId() : stream))));
}

/** An answer that ended early goes on. */
function goOn(message) {
  if (!isReady()) return;
  library.current.continueAnswer(message, newStreamId());
  begin([message]);
}

function begin(messages) {
  answers.begin(library.current, messages, model);
  transcript.update(library.current.rows);
  transcript.follow();
  announce("Answering.");
}

function showChange(conversation, message) {
  if (conversation.id !== library.current.id) chats.refresh();
  else transcript.viewOf(message)?.update(() => transcript.keepUp());
}

/** `messages` are of one stream. */
function showEnd(conversation, messages) {
  if (conversation.id !== library.current.id) {
    chats.mark(conversation.id);
    return;
  }
  for (const message of messages) transcript.viewOf(message)?.refresh();
  transcript.keepUp();
  showAround();
  chats.refresh();
  announceEnd(messages[0]);
  composer.focusWithKeyboard();
}

/** Reads out an answer that has ended; of samples the one that is shown, once all have. */
function announceEnd(message) {
  const row = library.current.rows.find((each) => each.includes(message)) ?? [message];
  if (row.some((each) => library.current.isWritten(each))) return;
  const read = row.find((each) => library.current.branch.includes(each)) ?? message;
  if (!(read.status in OUTCOMES)) return;
  const text = transcript.viewOf(read)?.spoken || "No text.";
  announce(row.length > 1 ? `${row.length} answers. ${text}` : `${OUTCOMES[read.status]} ${text}`);
}

function showBranch(message) {
  if (answers.isReading(library.current)) return;
  library.current.show(message);
  library.saveNow();
  transcript.update(library.current.rows);
  showAround();
}

function keepDraft(text) {
  library.draft = text;
}

function defaults() {
  return unkept ?? load(DEFAULTS, {});
}

/** What is set before a chat begins holds for all that begin later. */
function keepSettings(values) {
  if (library.current.isEmpty) {
    unkept = save(DEFAULTS, values) === null ? null : values;
  } else {
    library.current.settings = values;
    library.saveNow();
  }
}

function newChat() {
  library.begin();
  chatChanged();
  composer.focus();
}

/** Another conversation is current. `undo`: the one of the id `deleted` was deleted, and comes back by it. */
function chatChanged(undo = null, deleted = null) {
  if (deleted !== null) answers.stop(deleted);
  composer.text = library.draft;
  hideToast();
  transcript.show(library.current.rows);
  showAround();
  chats.update();
  if (undo) {
    showToast("Deleted the chat.", () => {
      undo();
      chatChanged();
    });
  }
}

/** Another tab has changed the conversation that is shown ("current"), or "deleted" it, or changed some "other". */
function showElsewhere(what, id) {
  const changed = library.find(id);
  if (!changed) answers.stop(id);
  else if (model && navigator.locks) answers.adopt(changed); // without locks two tabs would take it from each other
  chats.refresh();
  if (what === "current") {
    transcript.update(library.current.rows);
    showAround();
  } else if (what === "deleted") {
    // What was being written here goes into the new chat, after what may wait there.
    library.draft = [library.draft, composer.text].filter((text) => text !== "").join("\n\n");
    chatChanged();
    showToast("This chat was deleted in another tab.");
  }
}

byId("new-chat").addEventListener("click", newChat);
window.addEventListener("pagehide", () => {
  answers.leave();
  library.saveAll();
});
window.addEventListener("pageshow", ({ persisted }) => {
  if (persisted && model) showModel();
});

for (const message of library.current.unfinished) library.current.expect(message);
transcript.show(library.current.rows);
showAround();
composer.text = library.draft;
composer.focusWithKeyboard();
connection.open();
