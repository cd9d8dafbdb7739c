// The panel that lists the conversations: open one, delete one, export all, import some.

import { element, icon } from "./dom.js";

const byId = (id) => document.getElementById(id);

export class ChatsPanel {
  #dialog = byId("chats");
  #list = byId("chat-list");
  #problem = byId("import-problem");
  #library;
  #changed;
  #drawn = "";

  /** changed(undo?) is called when another conversation is current; `undo` takes a deletion back. */
  constructor(library, changed) {
    this.#library = library;
    this.#changed = changed;
    byId("open-chats").addEventListener("click", () => this.#open());
    this.#dialog.querySelector("[data-close]").addEventListener("click", () => this.#dialog.close());
    this.#dialog.addEventListener("click", (event) => {
      if (event.target === this.#dialog) this.#dialog.close(); // the backdrop
    });
    byId("export-chats").addEventListener("click", () => this.#export());
    byId("import-chats").addEventListener("click", () => byId("import-file").click());
    byId("import-file").addEventListener("change", (event) => this.#import(event.target));
  }

  #open() {
    this.#library.saveNow();
    this.#problem.textContent = "";
    this.#draw();
    this.#dialog.showModal();
  }

  /** Draws what another tab has changed, where anything is to be seen of it. */
  refresh() {
    if (this.#dialog.open && this.#drawn !== summary(this.#library.all())) this.#draw();
  }

  #draw() {
    const conversations = this.#library.all();
    this.#drawn = summary(conversations);
    byId("no-chats").hidden = conversations.length > 0;
    byId("export-chats").disabled = conversations.length === 0;
    this.#list.replaceChildren(...conversations.map((conversation) => this.#entry(conversation)));
  }

  #entry({ id, title, updated }) {
    const current = id === this.#library.current.id;
    const when = new Date(updated).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" });
    const open = element(
      "button",
      { type: "button", class: "chat", "aria-current": current ? "true" : null, onclick: () => this.#show(id) },
      element("span", { class: "chat-title" }, title),
      element("span", { class: "hint" }, when),
    );
    const name = `Delete “${title}”`;
    const bin = element("button", { type: "button", class: "tool", "aria-label": name, title: "Delete" }, icon("bin"));
    bin.addEventListener("click", () => this.#delete(id));
    return element("li", {}, open, bin);
  }

  #show(id) {
    this.#dialog.close();
    this.#library.open(id);
    this.#changed();
  }

  #delete(id) {
    const undo = this.#library.remove(id);
    this.#dialog.close();
    this.#changed(undo);
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
}

function summary(conversations) {
  return JSON.stringify(conversations.map(({ id, title, updated }) => [id, title, updated]));
}
