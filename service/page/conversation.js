// A conversation as data: a tree of messages. An edited question or another try at an answer is a new branch.
//
// Message: {id, parent, role: "user" | "assistant", content, status, error?, stats?}
// status of an answer: "streaming" | "done" | "length" | "stopped" | "error"; of a question: "done".

const TITLE_LENGTH = 60;

const newId = () => Array.from(crypto.getRandomValues(new Uint32Array(2)), (n) => n.toString(36)).join("");

export class Conversation {
  #messages = new Map(); // id → message, in the order in which they were made
  #leaf = null; // id of the last message of the branch that is shown

  constructor({ id = newId(), updated = Date.now(), leaf = null, messages = [] } = {}) {
    this.id = id;
    this.updated = updated;
    for (const message of messages) {
      // An answer that was cut off by leaving the page counts as stopped.
      if (message.status === "streaming") message.status = "stopped";
      this.#messages.set(message.id, message);
    }
    this.#leaf = this.#messages.has(leaf) ? leaf : (messages.at(-1)?.id ?? null);
  }

  /** From what toJSON() gave, wherever it has been since. Null if it is no conversation. */
  static from(stored) {
    const known = new Set();
    const isMessage = (value) => {
      const fits =
        typeof value?.id === "string" &&
        typeof value.content === "string" &&
        (value.role === "user" || value.role === "assistant") &&
        typeof value.status === "string" &&
        (value.status !== "error" || typeof value.error?.message === "string") &&
        (value.parent === null || known.has(value.parent)) &&
        !known.has(value.id);
      known.add(value?.id);
      return fits;
    };
    if (typeof stored?.id !== "string" || !Number.isFinite(stored.updated)) return null;
    if (!Array.isArray(stored.messages) || !stored.messages.every(isMessage)) return null;
    return new Conversation(stored);
  }

  toJSON() {
    return { id: this.id, updated: this.updated, leaf: this.#leaf, messages: [...this.#messages.values()] };
  }

  get isEmpty() {
    return this.#messages.size === 0;
  }

  get title() {
    const first = this.#messages.values().next().value?.content.trim().split("\n", 1)[0] ?? "";
    return first.length > TITLE_LENGTH ? `${first.slice(0, TITLE_LENGTH)}…` : first || "Empty chat";
  }

  /** The messages of the branch that is shown, from the first on. */
  get branch() {
    const messages = [];
    for (let at = this.#messages.get(this.#leaf); at; at = this.#messages.get(at.parent)) messages.unshift(at);
    return messages;
  }

  /** A question at the end, or in place of `edited` in a branch of its own. */
  ask(content, edited = null) {
    return this.#add({ role: "user", content, status: "done" }, edited ? edited.parent : this.#leaf);
  }

  beginAnswer() {
    return this.#add({ role: "assistant", content: "", status: "streaming" }, this.#leaf);
  }

  /** Goes back to before the last answer, so that its question can be answered again. One without a word is dropped. */
  leaveAnswer() {
    const last = this.#messages.get(this.#leaf);
    if (last?.role !== "assistant") return;
    this.#leaf = last.parent;
    if (last.content === "") this.#messages.delete(last.id);
  }

  /** The messages that stand in the same place, each in its branch, `message` among them. */
  alternatives(message) {
    return [...this.#messages.values()].filter(({ parent }) => parent === message.parent);
  }

  /** Shows the branch of `message`, with what was said last after it. */
  show(message) {
    const messages = [...this.#messages.values()];
    for (let at = message; at; at = messages.findLast(({ parent }) => parent === this.#leaf)) this.#leaf = at.id;
  }

  /** What the model is to see. A question whose answer failed before its first word is left out, with it. */
  forModel(systemPrompt) {
    const branch = this.branch;
    const said = branch.filter((message, i) => {
      const answer = message.role === "user" ? branch[i + 1] : message;
      return !answer || answer.content !== "" || answer.status === "streaming";
    });
    const turns = said.filter((message) => message.content !== "");
    return [
      ...(systemPrompt.trim() ? [{ role: "system", content: systemPrompt }] : []),
      ...turns.map(({ role, content }) => ({ role, content })),
    ];
  }

  #add(fields, parent) {
    const message = { id: newId(), parent, ...fields };
    this.#messages.set(message.id, message);
    this.#leaf = message.id;
    this.updated = Date.now();
    return message;
  }
}
