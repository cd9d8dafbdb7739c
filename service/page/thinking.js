// What a model thinks before it answers, folded away.

import { element } from "./dom.js";
import { Prose } from "./prose.js";

export class Thinking {
  #prose = new Prose();
  #label = element("span");
  node = element("details", { class: "thinking" }, element("summary", {}, this.#label), this.#prose.node);
  #text = "";

  constructor() {
    this.node.addEventListener("toggle", () => this.#draw());
  }

  update(text, goesOn) {
    this.#text = text;
    this.#label.textContent = goesOn ? "Thinking" : "Thoughts";
    this.node.classList.toggle("goes-on", goesOn);
    this.#draw();
  }

  /** Only what is unfolded is worth the work. */
  #draw() {
    if (this.node.open) this.#prose.update(this.#text);
  }
}
