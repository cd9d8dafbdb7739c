// How answers are made: the system prompt, the sampling values, the tools. An empty field is not sent: the server decides.

import { problemOf } from "./tools.js";

const NUMBERS = [
  "temperature",
  "top_p",
  "top_k",
  "min_p",
  "repetition_penalty",
  "presence_penalty",
  "frequency_penalty",
  "max_tokens",
  "seed",
  "samples",
];
const TEXTS = ["system", "stop", "tools"];
const CHOICES = ["json", "plain_thinking", "tools_off"];
const CHECKED = [...NUMBERS, "tools"]; // the fields whose values may be refused
const MAX_STOPS = 16;
const MAX_SAMPLES = 4;

/** What is well-formed of stored settings. */
export function settingsFrom(stored) {
  const settings = {};
  for (const name of NUMBERS) if (Number.isFinite(stored?.[name])) settings[name] = stored[name];
  for (const name of TEXTS) if (typeof stored?.[name] === "string" && stored[name] !== "") settings[name] = stored[name];
  for (const name of CHOICES) if (stored?.[name] === true) settings[name] = true;
  if (problemOf(settings.tools ?? "") !== "") delete settings.tools;
  const { samples } = settings;
  if (!Number.isInteger(samples) || samples < 1 || samples > MAX_SAMPLES) delete settings.samples;
  return settings;
}

/** The fields of a request that the user has set, but for messages and tools. */
export function samplingOf(settings) {
  const { system, samples, tools, tools_off: off, ...rest } = settingsFrom(settings);
  const { stop = "", json, plain_thinking: unthinking, ...fields } = rest;
  const stops = stopsOf(stop);
  if (stops.length > 0) fields.stop = stops;
  if (json) fields.response_format = { type: "json_object" };
  if (unthinking) fields.chat_template_kwargs = { enable_thinking: false };
  return fields;
}

/** One a line; `\n` and `\t` stand for themselves. */
function stopsOf(text) {
  const lines = text.split("\n").filter((line) => line !== "");
  return lines.map((line) => line.replaceAll("\\n", "\n").replaceAll("\\t", "\t")).slice(0, MAX_STOPS);
}

export class Settings {
  #dialog = document.getElementById("settings");
  #form = document.getElementById("settings-form");
  #opener = document.getElementById("open-settings");
  #values = null; // until some are shown
  #before; // what the field that is being changed had before
  #refused;
  #changed;

  /**
   * refused(text) is called with what was not taken when the panel closes, changed(settings) with all that holds
   * whenever the user has changed any.
   */
  constructor({ refused, changed }) {
    this.#refused = refused;
    this.#changed = changed;
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
      this.#values = {};
      this.#fill();
      this.#store();
    });
  }

  /** Shows other settings; `scope` says in words what they are for. Does nothing where the same are shown. */
  show(stored, scope) {
    document.getElementById("settings-scope").textContent = scope;
    const settings = settingsFrom(stored);
    if (JSON.stringify(settings) === JSON.stringify(this.#values)) return; // what was refused stays in its field
    this.#values = settings;
    this.#fill();
    this.#mark();
  }

  /** What was refused is still there, with what is wrong with it. */
  #open() {
    this.#dialog.showModal();
    this.#invalid[0]?.focus();
  }

  get #invalid() {
    return CHECKED.map((name) => this.#form.elements[name]).filter((field) => !field.validity.valid);
  }

  #take(field) {
    if (field.dataset.slides) {
      const number = this.#form.elements[field.dataset.slides];
      number.value = field.value;
      field = number;
    }
    const { name, value } = field;
    if (name === "tools") field.setCustomValidity(problemOf(value));
    if (CHOICES.includes(name)) this.#set(name, field.checked || undefined);
    else if (!field.validity.valid) this.#set(name, this.#before);
    else if (TEXTS.includes(name)) this.#set(name, value || undefined);
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
    const held = this.#values[name];
    const instead = typeof held === "string" ? "what was there holds" : `${held ?? "the default"} holds`;
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
    for (const name of TEXTS) this.#form.elements[name].value = this.#values[name] ?? "";
    for (const name of CHOICES) this.#form.elements[name].checked = this.#values[name] ?? false;
    this.#form.elements.tools.setCustomValidity("");
    for (const name of CHECKED) {
      const field = this.#form.elements[name];
      field.value = this.#values[name] ?? "";
      this.#check(field);
      this.#slide(field);
    }
  }

  #store() {
    this.#changed(settingsFrom(this.#values));
    this.#mark();
  }

  /** The button shows that something differs from the model's own way, or was not taken. */
  #mark() {
    document.getElementById("tools-switch").hidden = !("tools" in this.#values);
    const changed = Object.keys(this.#values).length > 0;
    const refused = this.#invalid.length > 0;
    this.#opener.classList.toggle("changed", changed);
    this.#opener.classList.toggle("refused", refused);
    this.#opener.title = refused ? "Settings (not all are taken)" : changed ? "Settings (changed)" : "Settings";
  }
}

const labelOf = (field) => field.labels[0].textContent;
