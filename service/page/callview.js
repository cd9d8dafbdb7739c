// The functions that an answer calls, as the page shows them. It runs none.

import { codeBlock, growCode } from "./code.js";
import { element } from "./dom.js";

export class CallsView {
  node = element("section", { class: "calls", "aria-label": "Calls of functions" });
  #figures = [];

  update(calls) {
    calls.forEach(({ function: { name, arguments: text } }, i) => {
      if (this.#figures[i]) {
        growCode(this.#figures[i], text);
        return;
      }
      this.#figures.push(codeBlock("json", text));
      this.node.append(element("p", {}, "Calls ", element("code", {}, name)), this.#figures[i]);
    });
  }
}
