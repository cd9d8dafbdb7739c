// One message on the page.

import { copyButton, element, icon } from "./dom.js";
import { Prose } from "./prose.js";

/**
 * What a reader may do: again() and edit(message, text), show(message); and what it knows of a message: the
 * alternatives(message) to show, and whether it isWritten(message) at this moment.
 */
export class MessageView {
  message;
  #reader;
  #prose = null;
  #foot = element("footer");
  #frame = 0;
  #rests = 0; // until then nothing is drawn, so that half of the time is the reader's
  #drawn = ""; // what tells whether the message has changed since

  constructor(message, reader) {
    this.message = message;
    this.#reader = reader;
    if (message.role === "user") {
      this.node = element("article", { class: "question", "aria-label": "You" });
      this.#showQuestion();
    } else {
      this.#prose = new Prose();
      this.node = element("article", { class: "answer", "aria-label": "Answer" }, this.#prose.node, this.#foot);
      this.render();
    }
  }

  #showQuestion() {
    this.#drawn = this.#state();
    const actions = element("div", { class: "actions" });
    actions.append(...this.#branches(), copyButton("Copy", () => this.message.content));
    actions.append(button("edit", "Edit", () => this.#editQuestion()));
    this.#foot.replaceChildren(actions);
    this.node.replaceChildren(element("p", { class: "asked" }, this.message.content), this.#foot);
  }

  #editQuestion() {
    const field = element("textarea", { "aria-label": "Edit the message", rows: 3 });
    field.value = this.message.content;
    const cancel = element("button", { type: "button", class: "plain" }, "Cancel");
    const form = element("form", { class: "editing" }, field);
    form.append(element("div", {}, cancel, element("button", { class: "primary" }, "Send")));
    const leave = () => {
      this.#showQuestion();
      this.#foot.querySelector(".edit").focus();
    };
    cancel.addEventListener("click", leave);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (field.value.trim() !== "") this.#reader.edit(this.message, field.value.trim());
    });
    form.addEventListener("keydown", (event) => {
      if (event.key === "Escape") leave();
      else if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.target !== field) return;
      else form.requestSubmit();
      event.preventDefault();
      event.stopPropagation();
    });
    this.node.replaceChildren(form);
    field.focus();
  }

  /** Where a message has been edited or tried again: which of its versions this is, and the way to the others. */
  #branches() {
    const all = this.#reader.alternatives(this.message);
    if (all.length < 2) return [];
    const at = all.indexOf(this.message);
    const step = (name, label, to) => {
      const arrow = button(name, "", () => this.#reader.show(all[to]));
      arrow.setAttribute("aria-label", label);
      arrow.disabled = to < 0 || to >= all.length;
      return arrow;
    };
    const count = element("span", { class: "branch-count" }, `${at + 1} / ${all.length}`);
    const nodes = [step("back", "Earlier version", at - 1), count, step("on", "Later version", at + 1)];
    return [element("span", { class: "branches", role: "group", "aria-label": "Versions" }, ...nodes)];
  }

  /** Draws at the next frame, for text comes faster than frames do; after a slow drawing some frames later. */
  update(drawn) {
    const draw = () => {
      const began = performance.now();
      if (began < this.#rests) {
        this.#frame = requestAnimationFrame(draw);
        return;
      }
      this.render();
      drawn();
      this.#rests = performance.now() + (performance.now() - began);
    };
    this.#frame ||= requestAnimationFrame(draw);
  }

  /** Draws what another tab has changed. A question that is being edited stays as it is. */
  refresh() {
    if (this.#drawn === this.#state() || this.node.querySelector(".editing")) return;
    if (this.#prose) this.render();
    else this.#showQuestion();
  }

  #state() {
    const { content, status } = this.message;
    const versions = this.#reader.alternatives(this.message).length;
    return [content.length, status, this.#reader.isWritten(this.message), versions].join();
  }

  render() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    this.#drawn = this.#state();
    const { content } = this.message;
    const streaming = this.#reader.isWritten(this.message);
    this.node.classList.toggle("streaming", streaming);
    this.node.classList.toggle("waiting", streaming && content === "");
    this.node.setAttribute("aria-busy", String(streaming));
    this.#prose.update(content);
    this.#foot.replaceChildren(...this.#footer());
  }

  #footer() {
    const { content, status, stats, finishReason } = this.message;
    if (this.#reader.isWritten(this.message)) {
      return content === "" ? [waiting()] : [element("p", { class: "stats" }, ...figures(stats))];
    }
    const nodes = [];
    if (status === "error") nodes.push(this.#failure());
    const ended = status === "done" || status === "length";
    if (ended && content === "") {
      nodes.push(element("p", { class: "note" }, `The model ended without text: ${finishReason ?? "no reason given"}`));
    } else if (status === "length") {
      nodes.push(element("p", { class: "note" }, "The answer reached the token limit."));
    }
    const items = figures(stats);
    if (status === "stopped" || status === "streaming") items.unshift(element("span", { class: "stopped" }, "Stopped"));
    const actions = element("div", { class: "actions" });
    actions.append(...this.#branches());
    if (content !== "") actions.append(copyButton("Copy", () => this.message.content));
    if (status !== "error") actions.append(this.#againButton("Try again", "quiet"));
    nodes.push(element("div", { class: "under" }, element("p", { class: "stats" }, ...items), actions));
    return nodes;
  }

  #againButton(label, style) {
    const again = button("retry", label, () => this.#reader.again());
    again.className = `${style} again`;
    return again;
  }

  #failure() {
    const { message, status, code } = this.message.error;
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

function button(name, label, pressed) {
  const node = element("button", { type: "button", class: `quiet ${name}`, onclick: pressed }, icon(name));
  if (label) node.append(element("span", {}, label));
  return node;
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
