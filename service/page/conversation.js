// A conversation as data: a tree of messages. An edited question or another try at an answer is a new branch.
//
// Message: {id, parent, role: "user" | "assistant", content, status, finishReason?, error?, stats?, dropped?}
// status of an answer: "streaming" | "done" | "length" | "stopped" | "error"; of a question: "done".
//
// A conversation may be open in several tabs. One tab writes a message, whose content only grows until its status
// is final, so of two copies one is always further on. Nothing is ever taken out of the tree: what is dropped is marked.

const TITLE_LENGTH = 60;

const isFurther = (a, b) =>
  a.content.length > b.content.length ||
  (a.content.length === b.content.length && b.status === "streaming" && a.status !== "streaming");
const isKept = ({ dropped, content }) => !dropped || content !== "";

const newId = () => Array.from(crypto.getRandomValues(new Uint32Array(2)), (n) => n.toString(36)).join("");

export class Conversation {
  #messages = new Map(); // id → message, in the order in which they were made
  #leaf = null; // id of the last message of the branch that is shown
  #growing = new Set(); // ids of the answers that were seen to begin or to grow

  constructor({ id = newId(), updated = Date.now(), leaf = null, messages = [] } = {}) {
    this.id = id;
    this.updated = updated;
    for (const message of messages) this.#messages.set(message.id, message);
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

  /** Whether an answer is being written, here or in another tab. One that was found unfinished was cut off. */
  isWritten({ id, status }) {
    return status === "streaming" && this.#growing.has(id);
  }

  /**
   * Takes in what `other`, another tab's copy of this conversation, has more. Its messages come first, so that each
   * follows its parent. Returns whether this one has anything that the copy lacks.
   */
  merge(other) {
    const merged = new Map();
    let ahead = false;
    for (const theirs of other.#messages.values()) {
      const ours = this.#messages.get(theirs.id) ?? theirs;
      const dropped = ours.dropped || theirs.dropped;
      if (isFurther(ours, theirs) || (dropped && !theirs.dropped)) ahead = true;
      if (ours === theirs || isFurther(theirs, ours)) this.#growing.add(ours.id);
      if (isFurther(theirs, ours)) Object.assign(ours, theirs);
      if (dropped) ours.dropped = true;
      merged.set(ours.id, ours);
    }
    for (const [id, message] of this.#messages) {
      if (merged.has(id)) continue;
      merged.set(id, message);
      ahead = true;
    }
    this.#messages = merged;
    this.updated = Math.max(this.updated, other.updated);
    return ahead;
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
    const message = this.#add({ role: "assistant", content: "", status: "streaming" }, this.#leaf);
    this.#growing.add(message.id);
    return message;
  }

  /** Goes back to before the last answer, so that its question can be answered again. One without a word is dropped. */
  leaveAnswer() {
    const last = this.#messages.get(this.#leaf);
    if (last?.role !== "assistant") return;
    this.#leaf = last.parent;
    if (last.content === "") last.dropped = true;
  }

  /** The messages that stand in the same place, each in its branch, `message` among them. */
  alternatives(message) {
    return [...this.#messages.values()].filter(
      (other) => other.parent === message.parent && (isKept(other) || other === message),
    );
  }

  /** Shows the branch of `message`, with what was said last after it. */
  show(message) {
    this.#leaf = message.id;
    this.follow();
  }

  /** Goes on to the end of the branch that is shown, where another tab has added to it or tried its answer again. */
  follow() {
    const messages = [...this.#messages.values()].filter(isKept);
    const after = (id) => messages.findLast(({ parent }) => parent === id);
    const last = this.#messages.get(this.#leaf);
    if (last && !isKept(last) && !after(last.id)) this.#leaf = last.parent;
    for (;;) {
      const next = after(this.#leaf);
      if (!next) return;
      this.#leaf = next.id;
    }
  }

  /** What the model is to see. A question whose answer failed before its first word is left out, with it. */
  forModel(systemPrompt) {
    const branch = this.branch;
    const said = branch.filter((message, i) => {
      const answer = message.role === "user" ? branch[i + 1] : message;
      return !answer || answer.content !== "";
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
