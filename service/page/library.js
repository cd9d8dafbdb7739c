// The conversations that this browser keeps, one entry of its storage each, so that a growing answer rewrites one.

import { Conversation } from "./conversation.js";
import { load, remove, save, storedKeys } from "./storage.js";

const PREFIX = "quire.chat.";
const CURRENT = "quire.current-chat"; // of this tab
const SAVE_EVERY_MS = 500;
const FORMAT = "quire-conversations";

export class Library {
  #timer = 0;
  #lost;

  /** `lost` is called whenever the browser's storage takes no more. */
  constructor(lost) {
    this.#lost = lost;
    const id = load(CURRENT, null, "sessionStorage"); // of one that was only begun, nothing is kept
    this.current = (id === null ? this.all()[0] : this.#find(id)) ?? new Conversation();
  }

  /** All that are kept, the newest first. */
  all() {
    const kept = storedKeys(PREFIX).map((key) => Conversation.from(load(key, null)));
    return kept.filter((conversation) => conversation).sort((a, b) => b.updated - a.updated);
  }

  open(id) {
    this.saveNow();
    const found = this.#find(id);
    if (found) this.#select(found);
  }

  /** The one that was current stays as it is. */
  begin() {
    this.saveNow();
    this.#select(new Conversation());
  }

  /** Returns a function that brings it back. */
  remove(id) {
    this.saveNow();
    const removed = this.#find(id);
    remove(PREFIX + id);
    if (this.current.id === id) this.#select(this.all()[0] ?? new Conversation());
    return () => {
      this.#keep(removed);
      this.open(id);
    };
  }

  saveNow() {
    clearTimeout(this.#timer);
    this.#timer = 0;
    if (!this.current.isEmpty) this.#keep(this.current);
  }

  /** For the many small changes of a growing answer. */
  saveSoon() {
    if (this.#timer === 0) this.#timer = setTimeout(() => this.saveNow(), SAVE_EVERY_MS);
  }

  /** All conversations as the text of a file. */
  exported() {
    this.saveNow();
    return JSON.stringify({ format: FORMAT, version: 1, conversations: this.all() }, null, 2);
  }

  /** Takes in such a file; one that is here already is replaced if the file's is newer. Returns how many came. */
  takeIn(text) {
    let file;
    try {
      file = JSON.parse(text);
    } catch {
      throw new Error("The file is not JSON.");
    }
    if (file?.format !== FORMAT || !Array.isArray(file.conversations)) {
      throw new Error("The file holds no conversations that Quire exported.");
    }
    const given = file.conversations.map((stored) => Conversation.from(stored));
    const broken = given.indexOf(null);
    if (broken >= 0) throw new Error(`Conversation ${broken + 1} of the file is damaged; nothing was imported.`);
    const newer = given.filter(({ id, updated }) => updated > (this.#find(id)?.updated ?? 0));
    for (const conversation of newer) this.#keep(conversation);
    if (newer.length > 0) this.#select(this.all()[0]);
    return newer.length;
  }

  #keep(conversation) {
    if (!save(PREFIX + conversation.id, conversation)) this.#lost();
  }

  #find(id) {
    return id === null ? null : Conversation.from(load(PREFIX + id, null));
  }

  #select(conversation) {
    this.current = conversation;
    save(CURRENT, conversation.id, "sessionStorage");
  }
}
