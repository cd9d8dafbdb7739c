// How answers are made: the system prompt and the sampling values. An empty field is not sent: the server decides.

import { load, save } from "./storage.js";

const KEY = "quire.settings";
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"];

export class Settings {
  #dialog = document.getElementById("settings");
  #form = document.getElementById("settings-form");
  #opener = document.getElementById("open-settings");
  #values = {};
  #before; // what the field that is being changed had before
  #refused;

  /** refused(text) is called with what was not taken when the panel closes. */
  constructor(refused) {
    this.#refused = refused;
    const stored = load(KEY, {});
    for (const name of NUMBERS) {
      if (Number.isFinite(stored?.[name])) this.#values[name] = stored[name];
    }
    this.#values.system = typeof stored?.system === "string" ? stored.system : "";

    this.#opener.addEventListener("click", () => this.#open());
    for (const button of this.#dialog.querySelectorAll("[data-close]")) {
      button.addEventListener("click", () => this.#dialog.close());
    }
    this.#dialog.addEventListener("click", (event) => {
      if (event.target === this.#dialog) this.#dialog.close(); // the backdrop
    });
    this.#dialog.addEventListener("close", () => {
      const problems = this.#invalid.map((field) => `${labelOf(field)}: ${field.validationMessage}`);
      if (problems.length > 0) this.#refused(`Not taken. ${problems.join(" ")}`);
    });
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.#invalid.length > 0) this.#invalid[0].focus();
      else this.#dialog.close();
    });
    this.#form.addEventListener("focusin", ({ target }) => {
      this.#before = this.#values[target.name];
    });
    this.#form.addEventListener("input", (event) => this.#take(event.target));
    document.getElementById("reset-settings").addEventListener("click", () => {
      this.#values = { system: "" };
      this.#fill();
      this.#store();
    });
    this.#fill();
    this.#mark();
  }

  get systemPrompt() {
    return this.#values.system;
  }

  /** The fields of a request that the user has set. */
  get sampling() {
    return Object.fromEntries(NUMBERS.filter((name) => name in this.#values).map((name) => [name, this.#values[name]]));
  }

  /** What was refused is still there, with what is wrong with it. */
  #open() {
    this.#dialog.showModal();
    this.#invalid[0]?.focus();
  }

  get #invalid() {
    return NUMBERS.map((name) => this.#form.elements[name]).filter((field) => !field.validity.valid);
  }

  #take(field) {
    if (field.dataset.slides) {
      const number = this.#form.elements[field.dataset.slides];
      number.value = field.value;
      field = number;
    }
    const { name, value } = field;
    if (name === "system") this.#values.system = value;
    else if (!field.validity.valid) this.#set(name, this.#before);
    else this.#set(name, value === "" ? undefined : Number(value));
    this.#check(field);
    this.#slide(field);
    this.#store();
  }

  /** An undefined value is the server's to decide. */
  #set(name, value) {
    if (value === undefined) delete this.#values[name];
    else this.#values[name] = value;
  }

  /** A value that is not taken is named beside its field, with what holds instead. */
  #check(field) {
    const { name, validity, validationMessage } = field;
    const problem = document.getElementById(`${field.id}-problem`);
    if (!problem) return;
    const instead = name in this.#values ? `${this.#values[name]} holds` : "the default holds";
    problem.textContent = validity.valid ? "" : `${validationMessage} Until then ${instead}.`;
    field.setAttribute("aria-invalid", String(!validity.valid));
  }

  #slide(field) {
    const slider = this.#form.querySelector(`[data-slides="${field.name}"]`);
    if (!slider) return;
    slider.value = this.#values[field.name] ?? 1;
    slider.classList.toggle("unset", !(field.name in this.#values));
  }

  #fill() {
    this.#form.elements.system.value = this.#values.system;
    for (const name of NUMBERS) {
      const field = this.#form.elements[name];
      field.value = this.#values[name] ?? "";
      this.#check(field);
      this.#slide(field);
    }
  }

  #store() {
    save(KEY, this.#values);
    this.#mark();
  }

  /** The button shows that something differs from the model's own way, or was not taken. */
  #mark() {
    const changed = this.#values.system.trim() !== "" || Object.keys(this.sampling).length > 0;
    const refused = this.#invalid.length > 0;
    this.#opener.classList.toggle("changed", changed);
    this.#opener.classList.toggle("refused", refused);
    this.#opener.title = refused ? "Settings (not all are taken)" : changed ? "Settings (changed)" : "Settings";
  }
}

const labelOf = (field) => field.labels[0].textContent;
