// How answers are made: the system prompt and the sampling values. An empty field is not sent: the server decides.

import { load, save } from "./storage.js";

const KEY = "quire.settings";
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"];

export class Settings {
  #dialog = document.getElementById("settings");
  #form = document.getElementById("settings-form");
  #opener = document.getElementById("open-settings");
  #values = {};

  constructor() {
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
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#dialog.close();
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

  #open() {
    this.#fill();
    this.#dialog.showModal();
  }

  #take(field) {
    if (field.dataset.slides) {
      const number = this.#form.elements[field.dataset.slides];
      number.value = field.value;
      field = number;
    }
    const { name, value } = field;
    if (name === "system") this.#values.system = value;
    else if (!this.#check(field)) return;
    else if (value === "") delete this.#values[name];
    else this.#values[name] = Number(value);
    this.#slide(field);
    this.#store();
  }

  /** A value out of range is named beside its field and not taken. */
  #check(field) {
    const problem = document.getElementById(`${field.id}-problem`);
    problem.textContent = field.validationMessage;
    field.setAttribute("aria-invalid", String(!field.validity.valid));
    return field.validity.valid;
  }

  #slide(field) {
    const slider = this.#form.querySelector(`[data-slides="${field.name}"]`);
    if (!slider) return;
    slider.value = field.value === "" ? "1" : field.value;
    slider.classList.toggle("unset", field.value === "");
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

  /** The button shows that something differs from the model's own way. */
  #mark() {
    const changed = this.#values.system.trim() !== "" || Object.keys(this.sampling).length > 0;
    this.#opener.classList.toggle("changed", changed);
    this.#opener.title = changed ? "Settings (changed)" : "Settings";
  }
}
