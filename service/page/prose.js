// Markdown on the page. Of an answer that grows, only what its last blocks have more is parsed and built, so it stays
// cheap, and what the reader has selected above its end stays selected.

import { codeBlock, growCode } from "./code.js";
import { element } from "./dom.js";
import { blocksOf } from "./markdown.js";
import { typeset } from "./math.js";
import { sanitised } from "./sanitise.js";

const WINDOW = 32_000; // characters that are parsed at once
const FORMULA = 4_000; // characters after which a formula that began is none

export class Prose {
  node = element("div", { class: "prose" });
  #settled = ""; // the beginning of the text, whose looks nothing after it can change
  #outline = []; // of its headings
  #kept = 0; // so many children of the node are its
  #marked = 0; // so many of them have the class that lets the browser pass over them out of sight
  #tail = []; // of each child after them {source, outline, raw}, with the element that it was made from
  #isPlain = false; // the tail is one block that is too long for Markdown

  update(text) {
    const lines = text.replace(/\r\n?/g, "\n");
    if (!lines.startsWith(this.#settled)) this.#restart();
    this.#mark();
    let size = WINDOW;
    for (;;) {
      const end = Math.min(lines.length, this.#settled.length + size);
      const tail = lines.slice(this.#settled.length, end);
      const before = this.#settled.length;
      const blocks = this.#isPlain ? [plain(tail, this.#outline)] : blocksOf(tail, this.#outline);
      this.#show(blocks);
      if (!this.#isPlain) this.#settle(tail, blocks);
      if (end === lines.length) return;
      if (this.#settled.length > before) size = WINDOW;
      else if (this.#isPlain || blocks[0]?.is === "fence") size *= 2;
      else this.#isPlain = true;
    }
  }

  /** Its first `most` characters as they read, without marks and buttons; says where there are more. */
  spoken(most) {
    let text = "";
    for (const child of this.node.children) {
      const copy = child.cloneNode(true);
      for (const unread of copy.querySelectorAll("button, .katex-html, annotation")) unread.remove();
      text += `${copy.textContent} `;
      if (text.length > 2 * most) break;
    }
    text = text.replace(/\s+/g, " ").trim();
    return text.length > most ? `${text.slice(0, most)}… and more` : text;
  }

  #restart() {
    this.node.replaceChildren();
    this.#settled = "";
    this.#outline = [];
    this.#kept = 0;
    this.#marked = 0;
    this.#tail = [];
    this.#isPlain = false;
  }

  /** What had settled when the text was drawn last has been laid out since: the browser knows how tall it is. */
  #mark() {
    for (; this.#marked < this.#kept; this.#marked += 1) this.node.children[this.#marked].classList.add("settled");
  }

  #show(blocks) {
    this.#tail = blocks.map((block, i) => {
      const old = this.#tail[i];
      if (old?.source === block.source && String(old.outline) === String(block.outline)) return old;
      const raw = sanitised(block.html()).firstElementChild ?? element("p");
      if (old) grow(this.node.childNodes[this.#kept + i], old.raw, raw);
      else this.node.append(finished(raw));
      return { source: block.source, outline: block.outline, raw };
    });
    while (this.node.childNodes.length > this.#kept + blocks.length) this.node.lastChild.remove();
  }

  /**
   * A block has settled once the next one has two whole lines, for these tell where it begins: a single one may still
   * become the head of a table. A formula whose end may come after any number of lines has not.
   */
  #settle(tail, blocks) {
    const isOpen = ({ is, source, start }) =>
      is === "paragraph_open" && source.trimStart().startsWith("\\[") && tail.length - start < FORMULA;
    const open = blocks.findIndex(isOpen);
    let settled = 0;
    blocks.slice(0, open < 0 ? undefined : open + 1).forEach(({ start }, i) => {
      if (/\n.*\n/.test(tail.slice(start, start + WINDOW))) settled = i;
    });
    if (settled === 0) return;
    this.#settled += tail.slice(0, blocks[settled].start);
    this.#outline = blocks[settled - 1].outline;
    this.#kept += settled;
    this.#tail = this.#tail.slice(settled);
  }
}

function plain(source, outline) {
  const text = element("p", { class: "plain-text" }, source);
  return { start: 0, source, is: "plain", html: () => text.outerHTML, outline };
}

/** A copy of the element as it stands on the page: with buttons, colours and formulas. */
function finished(raw) {
  const holder = element("div", {}, raw.cloneNode(true));
  for (const pre of holder.querySelectorAll("pre")) {
    pre.replaceWith(codeBlock(pre.dataset.language, pre.textContent));
  }
  for (const formula of holder.querySelectorAll(".math")) typeset(formula);
  for (const table of holder.querySelectorAll("div.table")) {
    table.tabIndex = 0; // it may have to be scrolled
    table.setAttribute("role", "group");
    table.setAttribute("aria-label", "Table");
  }
  for (const list of holder.querySelectorAll("ul, ol, blockquote")) list.dir = "auto"; // its marks stand where its text begins
  for (const box of holder.querySelectorAll("input")) box.setAttribute("aria-label", box.checked ? "done" : "to do");
  for (const link of holder.querySelectorAll("a[href]")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
    link.title = link.href;
  }
  return holder.firstChild;
}

/** Makes of `live`, which was finished from `old`, what would be finished from `raw`, and touches what differs only. */
function grow(live, old, raw) {
  if (old.isEqualNode(raw)) return;
  if (!isSameKind(old, raw)) {
    live.replaceWith(raw.nodeType === Node.ELEMENT_NODE ? finished(raw) : raw.cloneNode());
  } else if (raw.nodeType === Node.TEXT_NODE) {
    live.data = raw.data;
  } else if (raw.localName === "pre") {
    growCode(live, raw.textContent);
  } else {
    const [lives, olds] = [[...live.childNodes], [...old.childNodes]];
    raw.childNodes.forEach((child, i) => {
      if (olds[i]) grow(lives[i], olds[i], child);
      else live.append(child.nodeType === Node.ELEMENT_NODE ? finished(child) : child.cloneNode());
    });
    for (const extra of lives.slice(raw.childNodes.length)) extra.remove();
  }
}

function isSameKind(old, raw) {
  if (old.nodeType !== raw.nodeType) return false;
  if (raw.nodeType === Node.TEXT_NODE) return true;
  return !raw.matches(".math, input") && old.cloneNode().isEqualNode(raw.cloneNode());
}
