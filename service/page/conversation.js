// A conversation as data, kept in the browser.
//
// Message: {id, role: "user" | "assistant", content, status, error?, stats?}
// status of an answer: "streaming" | "done" | "length" | "stopped" | "error"; of a question: "done".

import { load, save } from "./storage.js";

const KEY = "quire.conversation";
const SAVE_EVERY_MS = 500;

const newId = () => Array.from(crypto.getRandomValues(new Uint32Array(2)), (n) => n.toString(36)).join("");

function isMessage(value) {
  return (
    typeof value?.id === "string" &&
    typeof value.content === "string" &&
    (value.role === "user" || value.role === "assistant")
  );
}

export class Conversation {
  messages = [];
  #timer = 0;

  /** The stored conversation. An answer that was cut off by leaving the page counts as stopped. */
  static restore() {
    const conversation = new Conversation();
    const stored = load(KEY, null);
    if (Array.isArray(stored?.messages) && stored.messages.every(isMessage)) {
      conversation.messages = stored.messages;
      for (const message of conversation.messages) {
        if (message.status === "streaming") message.status = "stopped";
      }
    }
    return conversation;
  }

  get isEmpty() {
    return this.messages.length === 0;
  }

  ask(content) {
    const message = { id: newId(), role: "user", content, status: "done" };
    this.messages.push(message);
    this.save();
    return message;
  }

  beginAnswer() {
    const message = { id: newId(), role: "assistant", content: "", status: "streaming" };
    this.messages.push(message);
    this.save();
    return message;
  }

  /** Takes the last answer back, so that its question can be answered again. */
  dropAnswer() {
    if (this.messages.at(-1)?.role === "assistant") this.messages.pop();
    this.save();
  }

  replaceAll(messages) {
    this.messages = messages;
    this.save();
  }

  /** What the model is to see. A question whose answer failed before its first word is left out, with it. */
  forModel(systemPrompt) {
    const said = this.messages.filter((message, i) => {
      const answer = message.role === "user" ? this.messages[i + 1] : message;
      return !answer || answer.content !== "" || answer.status === "streaming";
    });
    const turns = said.filter((message) => message.content !== "");
    return [
      ...(systemPrompt.trim() ? [{ role: "system", content: systemPrompt }] : []),
      ...turns.map(({ role, content }) => ({ role, content })),
    ];
  }

  save() {
    clearTimeout(this.#timer);
    this.#timer = 0;
    save(KEY, { version: 1, messages: this.messages });
  }

  /** For the many small changes of a growing answer. */
  saveSoon() {
    if (this.#timer === 0) this.#timer = setTimeout(() => this.save(), SAVE_EVERY_MS);
  }
}
