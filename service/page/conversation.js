// A conversation as data: a tree of messages. An edited question or another try at an answer is a new branch.
//
// Message: {id, parent, role: "user" | "assistant", content, status, finishReason?, error?, stats?, times?, dropped?,
//   reasoning?, calls?, group?, part?, earlier?, stream?, choice?, at?, request?, queued?}
// status of an answer: "streaming" | "done" | "length" | "stopped" | "cut" | "error"; of a question: "done".
// Samples of one question have the same `group`. An answer that is continued is in its next `part`, behind
// `earlier` tokens that its stats do not count. Its text comes by the `stream`, as its `choice` (0 where that is left
// out), of which the event `at` was the last to come, and was asked for by the `request`. It is `queued` while this tab
// reads too many others.
//
// A conversation may be open in several tabs. One tab writes a message, whose content only grows until its status
// is final, so of two copies one is always further on. Nothing is ever taken out of the tree: what is dropped is marked.

import { lengthOf } from "./calls.js";
import { aboutFrom, areMessages, messageFrom } from "./stored.js";

const TITLE_LENGTH = 60;

const progress = ({ part = 0, content, reasoning = "", calls = [], status }) => [
  part,
  content.length + reasoning.length + lengthOf(calls),
  status === "streaming" ? 0 : 1,
];
const isFurther = (a, b) => {
  const [ours, theirs] = [progress(a), progress(b)];
  const at = ours.findIndex((value, i) => value !== theirs[i]);
  return at >= 0 && ours[at] > theirs[at];
};
/** Whether a message has anything that can be gone on from. */
export const says = ({ content, calls = [] }) => content !== "" || calls.length > 0;
const isKept = (message) => !message.dropped || says(message);

const newId = () => Array.from(crypto.getRandomValues(new Uint32Array(2)), (n) => n.toString(36)).join("");

export class Conversation {
  #messages = new Map(); // id → message, in the order in which they were made
  #leaf = null; // id of the last message of the branch that is shown
  #writing = new Set(); // ids of the answers that this tab writes, whatever others have of them
  #growing = new Set(); // ids of the answers that were seen to begin or to grow
  #about; // {name?, settings?, at?}: what the user set, and when

  constructor({ id = newId(), updated = Date.now(), leaf = null, messages = [], about = {} } = {}) {
    this.id = id;
    this.updated = updated;
    this.#about = about;
    for (const message of messages) this.#messages.set(message.id, message);
    this.#leaf = this.#messages.has(leaf) ? leaf : (messages.at(-1)?.id ?? null);
  }

  /** From what toJSON() gave, wherever it has been since. Null if it is no conversation. */
  static from(stored) {
    const isTime = typeof stored?.updated === "number" && !Number.isNaN(new Date(stored.updated).getTime());
    if (typeof stored?.id !== "string" || !isTime) return null;
    if (!areMessages(stored.messages)) return null;
    return new Conversation({ ...stored, about: aboutFrom(stored.about), messages: stored.messages.map(messageFrom) });
  }

  toJSON() {
    const messages = [...this.#messages.values()];
    return { id: this.id, updated: this.updated, leaf: this.#leaf, about: this.#about, messages };
  }

  get isEmpty() {
    return this.#messages.size === 0;
  }

  get title() {
    if (this.#about.name) return this.#about.name;
    const first = this.#messages.values().next().value?.content.trim().split("\n", 1)[0] ?? "";
    return first.length > TITLE_LENGTH ? `${first.slice(0, TITLE_LENGTH)}…` : first || "Empty chat";
  }

  /** An empty name stands for the first words. */
  rename(name) {
    this.#about = { ...this.#about, name: name.trim(), at: Date.now() };
  }

  /** How answers are made here; null where nothing was set. */
  get settings() {
    return this.#about.settings ?? null;
  }

  set settings(settings) {
    this.#about = { ...this.#about, settings, at: Date.now() };
  }

  /** Whether the text, in small letters, is in its title or in any of its messages. */
  mentions(text) {
    const texts = [this.title, ...[...this.#messages.values()].map(({ content }) => content)];
    return texts.some((each) => each.toLowerCase().includes(text));
  }

  /** The answers that are not complete and may be picked up. */
  get unfinished() {
    return [...this.#messages.values()].filter(({ status, stream }) => status === "streaming" && stream);
  }

  /** The answers, complete or not, of which one stream has the text. */
  answersOf(stream) {
    return [...this.#messages.values()].filter((message) => message.stream === stream);
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
      if (isFurther(theirs, ours) && !this.#writing.has(ours.id)) become(ours, theirs);
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
    if ((other.#about.at ?? 0) > (this.#about.at ?? 0)) this.#about = other.#about;
    else if ((other.#about.at ?? 0) < (this.#about.at ?? 0)) ahead = true;
    return ahead;
  }

  /** The messages of the branch that is shown, from the first on. */
  get branch() {
    return this.#path(this.#leaf);
  }

  /** The same, each in a row of its own; at the end all samples of one question in one row. */
  get rows() {
    const branch = this.branch;
    const { group } = branch.at(-1) ?? {};
    const rows = branch.map((message) => [message]);
    if (group) rows[rows.length - 1] = this.alternatives(branch.at(-1)).filter((other) => other.group === group);
    return rows;
  }

  /** A question at the end, or in place of `edited` in a branch of its own. */
  ask(content, edited = null) {
    return this.#add({ role: "user", content, status: "done" }, edited ? edited.parent : this.#leaf);
  }

  /**
   * As many answers to the last question as `streams` has names of streams, each the next choice of its stream. The
   * first of them is the one that is gone on from.
   */
  beginAnswers(streams) {
    const parent = this.#leaf;
    const group = streams.length > 1 ? newId() : undefined;
    const begun = streams.map((stream, i) => {
      const choice = streams.slice(0, i).filter((other) => other === stream).length;
      const fields = { role: "assistant", content: "", status: "streaming", stream, ...(group && { group, choice }) };
      return this.#add(fields, parent);
    });
    for (const message of begun) this.expect(message);
    this.#leaf = begun[0].id;
    return begun;
  }

  /** The same answer goes on, by another stream. */
  continueAnswer(message, stream) {
    message.earlier = (message.earlier ?? 0) + (message.stats?.completionTokens ?? 0);
    for (const name of ["choice", "at", "times", "stats", "error", "finishReason"]) delete message[name];
    Object.assign(message, { stream, status: "streaming", part: (message.part ?? 0) + 1 });
    this.expect(message);
  }

  /** More is to come of this answer. */
  expect(message) {
    this.#growing.add(message.id);
  }

  /** While `writes` is true, what other tabs have of this answer is not taken in: they may still be behind. */
  setWriting(message, writes) {
    if (writes) this.#writing.add(message.id);
    else this.#writing.delete(message.id);
  }

  /**
   * Goes back to before the last answer, so that its question can be answered again. One without a word is dropped, and
   * so are such samples beside it.
   */
  leaveAnswer() {
    const last = this.#messages.get(this.#leaf);
    if (last?.role !== "assistant") return;
    this.#leaf = last.parent;
    const left = last.group ? this.alternatives(last).filter(({ group }) => group === last.group) : [last];
    for (const answer of left) if (!says(answer)) answer.dropped = true;
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

  /**
   * What was said before the message, as the API has it. A question whose answer failed before its first word is left
   * out, with it.
   */
  turnsBefore(message) {
    const path = this.#path(message.parent);
    const said = path.filter((each, i) => {
      const answer = each.role === "user" ? path[i + 1] : each;
      return !answer || says(answer);
    });
    return said.filter(says).flatMap((each, i, all) => turnsOf(each, all[i - 1]));
  }

  #path(id) {
    const messages = [];
    for (let at = this.#messages.get(id); at; at = this.#messages.get(at.parent)) messages.unshift(at);
    return messages;
  }

  #add(fields, parent) {
    const message = { id: newId(), parent, ...fields };
    this.#messages.set(message.id, message);
    this.#leaf = message.id;
    this.updated = Date.now();
    return message;
  }
}

/** The object stays, with all that the other has and nothing else: another stream has not had the events of the first. */
function become(ours, theirs) {
  for (const name of Object.keys(ours)) if (!(name in theirs)) delete ours[name];
  Object.assign(ours, theirs);
}

/** What was written after an answer that calls functions is what each of them returned. */
function turnsOf({ role, content, calls = [] }, before) {
  if (calls.length > 0) return [{ role, content: content === "" ? null : content, tool_calls: calls }];
  if (before?.calls) return before.calls.map(({ id }) => ({ role: "tool", tool_call_id: id, content }));
  return [{ role, content }];
}
