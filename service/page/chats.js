// The list of the conversations, beside the page where there is room, else a panel: open, find, rename, delete, export
// all, import some.

import { element, icon } from "./dom.js";
import { load, save } from "./storage.js";

const HIDDEN = "quire.chats-hidden";
const REFRESH_MS = 1000;
const RENAME = 1; // the second button of an entry
const DAY_MS = 24 * 3600 * 1000;

// Making one of these takes longer than drawing an entry.
const WHEN = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });
const MONTH = new Intl.DateTimeFormat(undefined, { month: "long", year: "numeric" });

const byId = (id) => document.getElementById(id);

export class ChatsPanel {
  #dialog = byId("chats");
  #side = byId("side");
  #body = byId("chats-body");
  #list = byId("chat-list");
  #search = byId("chat-search");
  #problem = byId("import-problem");
  #wide = window.matchMedia("(width >= 64rem)");
  #library;
  #changed;
  #drawn = "";
  #timer = 0;
  #unseen = new Set(); // ids of those to which an answer came while another one was shown

  /** changed(undo?) is called when another conversation is current; `undo` takes a deletion back. */
  constructor(library, changed) {
    this.#library = library;
    this.#changed = changed;
    byId("open-chats").addEventListener("click", () => this.#toggle());
    for (const button of this.#body.querySelectorAll("[data-close]")) {
      button.addEventListener("click", () => this.#dialog.close());
    }
    this.#dialog.addEventListener("click", (event) => {
      if (event.target === this.#dialog) this.#dialog.close(); // the backdrop
    });
    this.#search.addEventListener("input", () => this.#draw());
    this.#wide.addEventListener("change", () => this.#place());
    byId("export-chats").addEventListener("click", () => this.#export());
    byId("import-chats").addEventListener("click", () => byId("import-file").click());
    byId("import-file").addEventListener("change", (event) => this.#import(event.target));
    this.#place();
  }

  get #isShown() {
    return this.#dialog.open || !this.#side.hidden;
  }

  #place() {
    const wide = this.#wide.matches;
    if (wide) this.#dialog.close();
    (wide ? this.#side : this.#dialog).append(this.#body);
    this.#side.hidden = !wide || load(HIDDEN, false) === true;
    byId("open-chats").setAttribute("aria-expanded", String(!this.#side.hidden));
    if (!this.#side.hidden) this.#draw();
  }

  #toggle() {
    this.#problem.textContent = "";
    if (this.#wide.matches) {
      save(HIDDEN, !this.#side.hidden);
      this.#place();
    } else {
      this.#library.saveNow();
      this.#draw();
      this.#dialog.showModal();
    }
  }

  /** An answer has come to a conversation that is not the one that is shown. */
  mark(id) {
    this.#unseen.add(id);
    this.refresh();
  }

  /** Draws what has changed, where anything is to be seen of it, but not at once, for changes come in showers. */
  refresh() {
    if (this.#timer !== 0) return;
    this.#timer = setTimeout(() => {
      this.#timer = 0;
      const renames = this.#list.querySelector("input") !== null;
      if (this.#isShown && !renames && this.#drawn !== this.#summary(this.#library.all())) this.#draw();
    }, REFRESH_MS);
  }

  /** Draws at once, for the user has done something. */
  update() {
    this.#unseen.delete(this.#library.current.id);
    if (this.#isShown) this.#draw();
  }

  #draw() {
    const all = this.#library.all();
    const sought = this.#search.value.trim().toLowerCase();
    const found = sought === "" ? all : all.filter((conversation) => conversation.mentions(sought));
    this.#drawn = this.#summary(all);
    byId("no-chats").hidden = found.length > 0;
    byId("no-chats").textContent =
      all.length > 0 ? "No chat has these words." : "No chats yet. They are kept in this browser only.";
    byId("export-chats").disabled = all.length === 0;
    const nodes = [];
    let last = "";
    for (const conversation of found) {
      const group = groupOf(conversation.updated);
      if (group !== last) nodes.push(element("li", { class: "chat-group" }, element("h3", {}, group)));
      last = group;
      nodes.push(this.#entry(conversation));
    }
    const place = this.#placeOfFocus();
    this.#list.replaceChildren(...nodes);
    if (place) this.#focus(place);
  }

  get #entries() {
    return [...this.#list.querySelectorAll("li[data-id]")];
  }

  /** Where the keyboard is in the list; null if it is not there. A pointer needs no place to come back to. */
  #placeOfFocus() {
    const control = this.#list.querySelector(":focus-visible");
    if (!control) return null;
    const item = control.closest("li");
    const button = [...item.querySelectorAll("button")].indexOf(control);
    return { id: item.dataset.id, at: this.#entries.indexOf(item), button: button < 0 ? RENAME : button };
  }

  /** An entry that is no longer there is followed by the next, the last by the one before it. */
  #focus({ id, at, button }) {
    const entries = this.#entries;
    const item = entries.find(({ dataset }) => dataset.id === id) ?? entries[at] ?? entries.at(-1);
    (item?.querySelectorAll("button")[button] ?? this.#search).focus({ preventScroll: true });
  }

  #entry(conversation) {
    const { id, title, updated } = conversation;
    const current = id === this.#library.current.id;
    const when = WHEN.format(updated);
    const open = element(
      "button",
      { type: "button", class: "chat", title: when, "aria-current": current ? "true" : null, onclick: () => this.#show(id) },
      element("span", { class: "chat-title" }, title),
      this.#sign(conversation),
    );
    const item = element("li", { "data-id": id }, open);
    item.append(
      tool("edit", `Rename “${title}”`, "Rename", () => this.#rename(item, conversation)),
      tool("bin", `Delete “${title}”`, "Delete", () => this.#delete(id)),
    );
    return item;
  }

  #sign({ id, unfinished }) {
    if (unfinished.length > 0) return element("span", { class: "sign answering", role: "img", "aria-label": "answering" });
    if (this.#unseen.has(id)) return element("span", { class: "sign", role: "img", "aria-label": "new answer" });
    return "";
  }

  #rename(item, { id, title }) {
    const field = element("input", { type: "text", "aria-label": "Name of the chat", maxlength: 200 });
    field.value = title;
    const form = element("form", { class: "renaming" }, field);
    let over = false;
    const end = (name) => {
      if (over) return; // taking the field away is leaving it, too
      over = true;
      if (name !== null) this.#library.rename(id, name);
      this.#draw();
    };
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      end(field.value);
    });
    field.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.preventDefault();
      event.stopPropagation();
      end(null);
    });
    field.addEventListener("blur", () => setTimeout(() => end(field.value))); // once what follows has the focus
    item.replaceChildren(form);
    field.select();
    field.focus();
  }

  #show(id) {
    this.#dialog.close();
    this.#library.open(id);
    this.#changed();
  }

  #delete(id) {
    const undo = this.#library.remove(id);
    this.#dialog.close();
    this.#changed(undo, id);
  }

  #export() {
    const url = URL.createObjectURL(new Blob([this.#library.exported()], { type: "application/json" }));
    const day = new Date().toISOString().slice(0, 10);
    element("a", { href: url, download: `quire-chats-${day}.json` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10_000);
  }

  async #import(input) {
    const [file] = input.files;
    input.value = ""; // the same file may be chosen again
    if (!file) return;
    try {
      const count = this.#library.takeIn(await file.text());
      this.#problem.textContent = count === 0 ? "Everything in the file is here already." : "";
      if (count > 0) this.#changed();
    } catch (error) {
      this.#problem.textContent = error.message;
    }
    this.#draw();
  }

  #summary(conversations) {
    const shown = ({ id, title, updated, unfinished }) => [id, title, updated, unfinished.length, this.#unseen.has(id)];
    return JSON.stringify(conversations.map(shown));
  }
}

function tool(name, label, title, onclick) {
  return element("button", { type: "button", class: "tool", "aria-label": label, title, onclick }, icon(name));
}

/** Under which heading a time stands: of the last days by how long ago they were, else by month. */
function groupOf(time) {
  const midnight = new Date().setHours(0, 0, 0, 0);
  if (time >= midnight) return "Today";
  if (time >= midnight - DAY_MS) return "Yesterday";
  if (time >= midnight - 7 * DAY_MS) return "Last 7 days";
  if (time >= midnight - 30 * DAY_MS) return "Last 30 days";
  return MONTH.format(time);
}
