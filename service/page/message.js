// One message on the page.

import { copyButton, element, icon } from "./dom.js";
import { Prose } from "./prose.js";

export class MessageView {
  #message;
  #prose = null;
  #foot = null;
  #frame = 0;

  /** `again` is called when the user asks for another try at this answer. */
  constructor(message, again) {
    this.#message = message;
    if (message.role === "user") {
      this.node = element("article", { class: "question", "aria-label": "You" }, message.content);
    } else {
      this.again = again;
      this.#prose = new Prose();
      this.#foot = element("footer");
      this.node = element("article", { class: "answer", "aria-label": "Answer" }, this.#prose.node, this.#foot);
      this.render();
    }
  }

  /** Draws at the next frame: text comes faster than frames do. */
  update(drawn) {
    this.#frame ||= requestAnimationFrame(() => {
      this.render();
      drawn();
    });
  }

  render() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    const { content, status } = this.#message;
    const streaming = status === "streaming";
    this.node.classList.toggle("streaming", streaming);
    this.node.classList.toggle("waiting", streaming && content === "");
    this.node.setAttribute("aria-busy", String(streaming));
    this.#prose.update(content);
    this.#foot.replaceChildren(...this.#footer());
  }

  #footer() {
    const { content, status, stats } = this.#message;
    if (status === "streaming") {
      return content === "" ? [waiting()] : [element("p", { class: "stats" }, ...figures(stats))];
    }
    const nodes = [];
    if (status === "error") nodes.push(this.#failure());
    if (status === "length") nodes.push(element("p", { class: "note" }, "The answer reached the token limit."));
    const items = figures(stats);
    if (status === "stopped") items.unshift(element("span", { class: "stopped" }, "Stopped"));
    const actions = element("div", { class: "actions" });
    if (content !== "") actions.append(copyButton("Copy", () => this.#message.content));
    if (status !== "error") actions.append(this.#againButton("Try again", "quiet"));
    nodes.push(element("div", { class: "under" }, element("p", { class: "stats" }, ...items), actions));
    return nodes;
  }

  #againButton(label, style) {
    const button = element("button", { type: "button", class: `${style} again` }, icon("retry"));
    button.append(element("span", {}, label));
    button.addEventListener("click", () => this.again());
    return button;
  }

  #failure() {
    const { message, status, code } = this.#message.error;
    const detail = [status || null, code].filter((part) => part !== null && part !== undefined).join(" · ");
    return element(
      "div",
      { class: "failure", role: "alert" },
      icon("alert"),
      element("div", {}, element("p", {}, message), detail && element("p", { class: "detail" }, detail)),
      this.#againButton("Retry", "plain"),
    );
  }
}

function waiting() {
  const blocks = element("span", { class: "blocks", "aria-hidden": "true" });
  for (let i = 0; i < 4; i += 1) blocks.append(element("i"));
  return element("p", { class: "reading" }, blocks, element("span", {}, "Reading the prompt"));
}

/** The figures under an answer, each with an explanation as its tooltip. */
function figures(stats = {}) {
  const items = [];
  const add = (text, title) => items.push(element("span", { title }, text));
  if (stats.tokensPerSecond) add(`${rounded(stats.tokensPerSecond)} tokens/s`, "Tokens after the first, per second");
  if (stats.firstTokenMs !== undefined) {
    add(`first token ${duration(stats.firstTokenMs)}`, "From sending the question to the first text");
  }
  if (stats.completionTokens !== undefined) add(count(stats.completionTokens, "token"), "Length of the answer");
  if (stats.promptTokens !== undefined) {
    add(
      stats.cachedTokens > 0
        ? `${stats.cachedTokens} of ${count(stats.promptTokens, "prompt token")} cached`
        : count(stats.promptTokens, "prompt token"),
      "Prompt tokens whose keys and values were already in the KV cache are not computed again",
    );
  }
  return items;
}

const count = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;
const rounded = (n) => (n < 10 ? n.toFixed(1) : Math.round(n).toLocaleString("en"));
const duration = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`);
