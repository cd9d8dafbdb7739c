// The conversations that this browser keeps, one entry of its storage each, so that a growing answer rewrites one.
//
// Other tabs write there, too. Whoever saves a conversation first takes in what is stored of it. The date of a deleted
// one is an entry of its own: a tab that saves before it hears of the deletion cannot overwrite that.

import { Conversation } from "./conversation.js";
import { load, remove, save, storedKeys } from "./storage.js";

const PREFIX = "quire.chat.";
const DELETED = "quire.deleted.";
const CURRENT = "quire.current-chat"; // of this tab
const DRAFT = "quire.draft."; // of this tab, too
const SAVE_EVERY_MS = 500;
const DELETED_FOR_MS = 30 * 24 * 3600 * 1000; // no tab shows a conversation for longer unseen
const FORMAT = "quire-conversations";

export class Library {
  #timers = new Map(); // id → timer of a conversation that is to be saved
  #held = new Map(); // id → {conversation, times}: answers come to it, whichever is current
  #unsaved = new Map(); // id → conversation of which the browser did not keep the last
  #gone = new Set(); // ids of the deleted ones of which it did not even keep that
  #kept;

  /**
   * kept(problem) is called after each attempt to save: why the browser's storage takes no more, "full" or "forbidden",
   * or null once it has everything. elsewhere(what, id) is called when another tab has changed a conversation: what is
   * "current" or "deleted" where it is the current one, else "other".
   */
  constructor({ kept, elsewhere }) {
    this.#kept = kept;
    const id = load(CURRENT, null, "sessionStorage"); // of one that was only begun, nothing is kept
    this.current = (id === null ? this.all()[0] : this.find(id)) ?? new Conversation();
    for (const key of storedKeys(DELETED)) {
      remove(PREFIX + key.slice(DELETED.length)); // it was being saved while it was deleted
      if (load(key, 0) < Date.now() - DELETED_FOR_MS) remove(key);
    }
    window.addEventListener("storage", ({ key }) => {
      const prefix = [PREFIX, DELETED].find((each) => key?.startsWith(each));
      if (!prefix) return;
      const id = key.slice(prefix.length);
      if (id === this.current.id) {
        elsewhere(this.#followElsewhere(), id);
      } else {
        if (this.#held.has(id)) this.catchUp(this.#held.get(id).conversation);
        elsewhere("other", id);
      }
    });
    window.addEventListener("pageshow", ({ persisted }) => {
      if (persisted) elsewhere(this.#followElsewhere(), this.current.id); // nothing was told meanwhile
    });
  }

  /** All that are kept, in the browser or only by this tab, the newest first. */
  all() {
    const ids = new Set([...storedKeys(PREFIX).map((key) => key.slice(PREFIX.length)), ...this.#unsaved.keys()]);
    const kept = [...ids].map((id) => this.find(id));
    return kept.filter((conversation) => conversation).sort((a, b) => b.updated - a.updated);
  }

  /** What was written and not sent: of each conversation, and of the one that is still to begin. */
  get draft() {
    return load(this.#draftKey, "", "sessionStorage");
  }

  set draft(text) {
    if (text === "") remove(this.#draftKey, "sessionStorage");
    else save(this.#draftKey, text, "sessionStorage");
  }

  get #draftKey() {
    return DRAFT + (this.current.isEmpty ? "new" : this.current.id);
  }

  /** The object that is in use of a conversation, if there is one, else what is stored of it; null if there is none. */
  find(id) {
    if (id === null || this.isDeleted(id)) return null;
    const stored = load(PREFIX + id, null);
    if (stored === null && !this.#unsaved.has(id)) return null;
    const { current } = this;
    if (current?.id === id && !current.isEmpty) return current;
    return this.#held.get(id)?.conversation ?? this.#unsaved.get(id) ?? Conversation.from(stored);
  }

  open(id) {
    this.saveNow();
    const found = this.find(id);
    if (found) this.#select(found);
  }

  /** The one that was current stays as it is. */
  begin() {
    this.saveNow();
    this.#select(new Conversation());
  }

  /** The conversation is one object until it is released as often as it was held. */
  hold(conversation) {
    const held = this.#held.get(conversation.id) ?? { conversation, times: 0 };
    held.times += 1;
    this.#held.set(conversation.id, held);
  }

  release({ id }) {
    const held = this.#held.get(id);
    held.times -= 1;
    if (held.times === 0) this.#held.delete(id);
  }

  rename(id, name) {
    const found = this.find(id);
    if (!found) return;
    found.rename(name);
    this.#keep(found);
  }

  /** Returns a function that brings it back. */
  remove(id) {
    this.saveNow();
    const removed = this.find(id);
    remove(PREFIX + id);
    if (save(DELETED + id, Date.now())) this.#gone.add(id);
    this.#unsaved.delete(id);
    if (this.current.id === id) this.#select(this.all()[0] ?? new Conversation());
    this.saveAll(); // there may be room again
    return () => {
      if (!removed) return; // another tab had deleted it before
      this.saveNow();
      this.#bringBack(removed);
      this.#select(removed);
    };
  }

  isDeleted(id) {
    return this.#gone.has(id) || load(DELETED + id, null) !== null;
  }

  saveNow(conversation = this.current) {
    clearTimeout(this.#timers.get(conversation.id));
    this.#timers.delete(conversation.id);
    if (!conversation.isEmpty) this.#keep(conversation);
  }

  /** For the many small changes of a growing answer. */
  saveSoon(conversation) {
    const { id } = conversation;
    if (!this.#timers.has(id)) this.#timers.set(id, setTimeout(() => this.saveNow(conversation), SAVE_EVERY_MS));
  }

  /** Before the page goes away. */
  saveAll() {
    this.saveNow();
    const others = [...this.#held.values()].map(({ conversation }) => conversation);
    for (const conversation of new Set([...others, ...this.#unsaved.values()])) this.saveNow(conversation);
    if (this.#unsaved.size === 0) this.#kept(null);
  }

  /** All conversations as the text of a file. */
  exported() {
    this.saveAll();
    return JSON.stringify({ format: FORMAT, version: 1, conversations: this.all() }, null, 2);
  }

  /** Takes in such a file; one that is here already gets what a newer one of the file has. Returns how many came. */
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
    const newer = given.filter(({ id, updated }) => updated > (this.find(id)?.updated ?? 0));
    for (const conversation of newer) this.#bringBack(conversation);
    this.catchUp(this.current);
    if (newer.length > 0) this.#select(this.all()[0]);
    return newer.length;
  }

  /** Takes in what other tabs stored of the conversation. */
  catchUp(conversation) {
    const stored = Conversation.from(load(PREFIX + conversation.id, null));
    // Two tabs that save at the same moment may not see each other's: then what is missing is saved again.
    if (stored && conversation.merge(stored)) this.saveSoon(conversation);
  }

  /** What has become of the current conversation in another tab: "current" or "deleted". */
  #followElsewhere() {
    if (this.isDeleted(this.current.id)) {
      this.#select(new Conversation());
      return "deleted";
    }
    this.catchUp(this.current);
    this.current.follow();
    return "current";
  }

  #keep(conversation) {
    const { id } = conversation;
    this.#unsaved.delete(id);
    if (this.isDeleted(id)) return;
    const stored = Conversation.from(load(PREFIX + id, null));
    if (stored) conversation.merge(stored);
    const problem = save(PREFIX + id, conversation);
    if (problem) this.#unsaved.set(id, conversation);
    if (problem || this.#unsaved.size === 0) this.#kept(problem);
  }

  #bringBack(conversation) {
    remove(DELETED + conversation.id);
    this.#gone.delete(conversation.id);
    this.#keep(conversation);
  }

  #select(conversation) {
    this.current = conversation;
    save(CURRENT, conversation.id, "sessionStorage");
  }
}
