// One message on the page.

import { lengthOf } from "./calls.js";
import { CallsView } from "./callview.js";
import { says } from "./conversation.js";
import { copyButton, element, icon } from "./dom.js";
import { figures } from "./figures.js";
import { Prose } from "./prose.js";
import { Thinking } from "./thinking.js";
import { whyOf } from "./why.js";

const NOTES = {
  length: "The answer reached the token limit.",
  cut: "The answer was cut off: the server no longer has the rest of it.",
};

const SPOKEN = 500; // characters of an answer that are read out
const TOO_LONG = "context_length_exceeded";
const SHORTER =
  "The same again would fail again: shorten the message, lower “Max tokens” or “Samples” in the settings if they " +
  "are set, or begin a new chat.";

const CALLED = "This page runs no functions. What you write next goes back as the result.";

/**
 * What a reader may do: again(), goOn(message), edit(message, text), editLast() the last question, show(message), begin()
 * a new chat; and what it knows of a message: the alternatives(message) to show, whether it isWritten(message) at this
 * moment, canGoOn(message), and whether it isShown(message), which tells which of several samples the chat goes on from.
 */
export class MessageView {
  message;
  #reader;
  #isSample;
  #prose = null;
  #thinking = null;
  #calls = null;
  #foot = element("footer");
  #why = null; // the element that says where the time went, once it was asked for
  #frame = 0;
  #rests = 0; // until then nothing is drawn, so that half of the time is the reader's
  #drawn = ""; // what tells whether the message has changed since

  /** `sample` says which of several samples it is, as "2 of 4"; "" where it is none. */
  constructor(message, reader, sample = "") {
    this.message = message;
    this.#reader = reader;
    this.#isSample = sample !== "";
    if (message.role === "user") {
      this.node = element("article", { class: "question", "aria-label": "You" });
      this.#showQuestion();
    } else {
      this.#prose = new Prose();
      this.node = element("article", { class: "answer", "aria-label": `Answer ${sample}`.trim() }, this.#prose.node, this.#foot);
      this.render();
    }
  }

  #showQuestion() {
    this.#drawn = this.#state();
    const actions = element("div", { class: "actions" });
    actions.append(...this.#branches(), copyButton("Copy", () => this.message.content));
    actions.append(button("edit", "Edit", () => this.edit()));
    this.#foot.replaceChildren(actions);
    this.node.replaceChildren(element("p", { class: "asked" }, this.message.content), this.#foot);
  }

  /** Shows a question as a form. */
  edit() {
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
    if (this.#isSample && !this.#reader.isShown(this.message)) return says(this.message) ? [this.#choose()] : [];
    const all = this.#versions();
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

  /** Samples that stand side by side are one version, those of another try as well. */
  #versions() {
    const { group } = this.message;
    const seen = new Set();
    return this.#reader.alternatives(this.message).filter((other) => {
      if (other === this.message || other.group === undefined) return true;
      if (other.group === group) return !this.#isSample;
      return !seen.has(other.group) && seen.add(other.group);
    });
  }

  #choose() {
    const choose = button("on", "Go on from this one", () => this.#reader.show(this.message));
    choose.classList.add("choose");
    return choose;
  }

  /** Draws at the next frame, for text comes faster than frames do; after a slow drawing some frames later. */
  update(drawn) {
    const draw = () => {
      const began = performance.now();
      if (began < this.#rests) {
        this.#frame = requestAnimationFrame(draw);
        return;
      }
      this.#frame = 0;
      this.refresh();
      drawn();
      this.#rests = performance.now() + (performance.now() - began);
    };
    this.#frame ||= requestAnimationFrame(draw);
  }

  /** Draws what has changed, so that a button keeps the focus if nothing has. A question that is being edited stays. */
  refresh() {
    if (this.#drawn === this.#state() || this.node.querySelector(".editing")) return;
    if (this.#prose) this.render();
    else this.#showQuestion();
  }

  #state() {
    const { content, reasoning = "", calls = [], status, lost = false, queued = false } = this.message;
    const { isWritten, alternatives, isShown } = this.#reader;
    const versions = alternatives(this.message).length;
    const said = content.length + reasoning.length + lengthOf(calls);
    return [said, status, lost, queued, isWritten(this.message), versions, isShown(this.message)].join();
  }

  render() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    this.#drawn = this.#state();
    const { content, reasoning = "", calls = [] } = this.message;
    const streaming = this.#reader.isWritten(this.message);
    this.node.classList.toggle("streaming", streaming);
    const chosen = this.#isSample && this.#reader.isShown(this.message);
    this.node.classList.toggle("chosen", chosen);
    if (chosen) this.node.setAttribute("aria-current", "true");
    else this.node.removeAttribute("aria-current");
    this.node.classList.toggle("waiting", streaming && content === "");
    this.node.setAttribute("aria-busy", String(streaming));
    if (reasoning !== "" && !this.#thinking) {
      this.#thinking = new Thinking();
      this.node.prepend(this.#thinking.node);
    }
    this.#thinking?.update(reasoning, streaming && content === "");
    this.#prose.update(content);
    if (calls.length > 0) this.#showCalls(calls);
    this.#foot.replaceChildren(...this.#footer());
  }

  /** The answer as it is read out. */
  get spoken() {
    return this.#prose.spoken(SPOKEN);
  }

  #showCalls(calls) {
    if (!this.#calls) {
      this.#calls = new CallsView();
      this.#foot.before(this.#calls.node);
    }
    this.#calls.update(calls);
  }

  #footer() {
    const { content, reasoning = "", calls = [], status, lost, queued } = this.message;
    if (this.#reader.isWritten(this.message)) {
      if (lost) return [element("p", { class: "note" }, "The connection was lost. Trying to pick the answer up.")];
      const silent = content + reasoning === "" && calls.length === 0;
      if (queued) return [waiting("Waiting for other answers to end")];
      if (silent) return [waiting("Reading the prompt")];
      return [element("p", { class: "stats" }, ...figures(this.message))];
    }
    const nodes = status === "error" ? [this.#failure()] : [];
    const note = this.#note();
    if (note) nodes.push(element("p", { class: "note" }, note));
    const items = figures(this.message);
    if (status === "stopped" || status === "streaming") items.unshift(element("span", { class: "stopped" }, "Stopped"));
    nodes.push(element("div", { class: "under" }, element("p", { class: "stats" }, ...items), this.#actions()));
    return nodes;
  }

  #note() {
    const { content, calls = [], status, finishReason } = this.message;
    if (calls.length > 0 && status === "done") return CALLED;
    if (content === "" && (status === "done" || status === "length")) {
      return `The model ended without text: ${finishReason ?? "no reason given"}`;
    }
    return NOTES[status];
  }

  #actions() {
    const { content, calls = [], status } = this.message;
    const actions = element("div", { class: "actions" }, ...this.#branches());
    if (content !== "") actions.append(copyButton("Copy", () => this.message.content));
    if (this.message.request) actions.append(this.#whyButton());
    if (this.#isSample && !this.#reader.isShown(this.message)) return actions;
    if (content !== "" && calls.length === 0 && status !== "done" && this.#reader.canGoOn(this.message)) {
      const goOn = button("on", "Continue", () => this.#reader.goOn(this.message));
      goOn.classList.add("again");
      actions.append(goOn);
    }
    if (status !== "error") actions.append(this.#againButton("Try again", "quiet"));
    return actions;
  }

  #whyButton() {
    const asks = button("clock", "Why", async () => {
      const shown = this.#why?.isConnected;
      this.#why?.remove();
      if (!shown) {
        const why = element("section", { class: "why", "aria-label": "Where the time went" });
        this.#why = why;
        this.node.append(why);
        why.append(await whyOf(this.message.request));
        why.scrollIntoView({ block: "nearest" }); // below the last answer it opens out of sight
      }
      asks.setAttribute("aria-expanded", String(!shown));
    });
    asks.title = "Where the time of this answer went";
    asks.setAttribute("aria-expanded", String(this.#why?.isConnected === true));
    return asks;
  }

  #againButton(label, style) {
    const again = button("retry", label, () => this.#reader.again());
    again.className = `${style} again`;
    return again;
  }

  #failure() {
    const { message, status, code } = this.message.error;
    const detail = [status || null, code].filter((part) => part !== null && part !== undefined).join(" · ");
    const words = [element("p", {}, message)];
    if (code === TOO_LONG) words.push(element("p", {}, SHORTER));
    if (detail) words.push(element("p", { class: "detail" }, detail));
    return element(
      "div",
      { class: "failure", role: "alert" },
      icon("alert"),
      element("div", {}, ...words),
      ...(code === TOO_LONG ? this.#waysOut() : [this.#againButton("Retry", "plain")]),
    );
  }

  #waysOut() {
    const buttons = [
      button("edit", "Edit", () => this.#reader.editLast()),
      button("edit", "New chat", () => this.#reader.begin()),
    ];
    for (const each of buttons) each.className = "plain again";
    return buttons;
  }
}

function button(name, label, pressed) {
  const node = element("button", { type: "button", class: `quiet ${name}`, onclick: pressed }, icon(name));
  if (label) node.append(element("span", {}, label));
  return node;
}

function waiting(text) {
  const blocks = element("span", { class: "blocks", "aria-hidden": "true" });
  for (let i = 0; i < 4; i += 1) blocks.append(element("i"));
  return element("p", { class: "reading" }, blocks, element("span", {}, text));
}
