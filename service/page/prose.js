// Markdown on the page. Only the blocks whose source has changed are built again, so an answer that grows stays
// cheap, and what the reader has selected above its end stays selected.

import { copyButton, element } from "./dom.js";
import { parseBlocks, parseInline } from "./markdown.js";

export class Prose {
  node = element("div", { class: "prose" });
  #blocks = [];

  update(text) {
    const blocks = parseBlocks(text);
    const children = [...this.node.children];
    blocks.forEach((block, i) => {
      const old = this.#blocks[i];
      if (old?.kind === block.kind && old.source === block.source) return;
      if (old?.kind === "code" && block.kind === "code" && old.language === block.language) {
        children[i].querySelector("code").textContent = block.text;
      } else if (old) {
        children[i].replaceWith(render(block));
      } else {
        this.node.append(render(block));
      }
    });
    for (const extra of children.slice(blocks.length)) extra.remove();
    this.#blocks = blocks;
  }
}

function render(block) {
  switch (block.kind) {
    case "heading":
      // The page's own h1 and h2 stay above the headings of an answer.
      return element(`h${Math.min(block.level + 2, 6)}`, {}, ...inline(block.text));
    case "rule":
      return element("hr");
    case "code":
      return codeBlock(block);
    case "quote":
      return element("blockquote", {}, ...block.blocks.map(render));
    case "list": {
      const items = block.items.map((blocks) => element("li", {}, ...blocks.flatMap(itemContent)));
      return element(block.ordered ? "ol" : "ul", { start: block.start !== 1 && block.start }, ...items);
    }
    default:
      return element("p", {}, ...inline(block.text));
  }
}

/** The first paragraph of an item stands without <p>: the list stays tight. */
function itemContent(block, index) {
  return index === 0 && block.kind === "paragraph" ? inline(block.text) : [render(block)];
}

function codeBlock(block) {
  const code = element("code", {}, block.text);
  return element(
    "figure",
    { class: "code" },
    element(
      "figcaption",
      {},
      element("span", {}, block.language || "text"),
      copyButton("Copy", () => code.textContent),
    ),
    element("pre", { tabindex: "0", "aria-label": "Code" }, code),
  );
}

function inline(text) {
  return parseInline(text).map(inlineNode);
}

function inlineNode(piece) {
  if (piece.kind === "text") return document.createTextNode(piece.text);
  if (piece.kind === "code") return element("code", {}, piece.text);
  return element(piece.kind, {}, ...piece.pieces.map(inlineNode));
}
