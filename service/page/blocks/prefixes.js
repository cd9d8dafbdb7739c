// The texts in the prefix cache, as a tree of runs: how large, how often found, what was evicted.

import { element } from "../dom.js";
import { int32Of } from "./updates.js";

const MOST_DEPTH = 12; // of indentation

export class PrefixTree {
  #ask;
  #focus;
  #show;
  #runs = []; // {parent, blocks, root, ...}
  #chosen = -1;

  constructor(ask, focus, show) {
    this.#ask = ask;
    this.#focus = focus;
    this.#show = show;
    document.getElementById("look-up").addEventListener("click", () => this.lookUp());
  }

  async lookUp() {
    const sum = document.getElementById("prefix-sum");
    try {
      const tree = await this.#ask("/v1/blocks/prefixes");
      this.#runs = tree.runs.map((run) => ({ ...run, blocks: int32Of(run.blocks) }));
      this.#runs.forEach((run, i) => {
        run.root = run.parent === null ? i : this.#runs[run.parent].root;
        run.depth = run.parent === null ? 0 : this.#runs[run.parent].depth + 1;
      });
      const blocks = this.#runs.reduce((total, run) => total + run.blocks.length, 0);
      const texts = this.#runs.filter((run) => run.parent === null).length;
      sum.textContent =
        `${texts} text${texts === 1 ? "" : "s"} in ${blocks.toLocaleString("en")} blocks; since this is watched, ` +
        `${tree.hits.toLocaleString("en")} blocks found and ${tree.evictions.toLocaleString("en")} evicted` +
        (tree.left_out ? `; ${tree.left_out} small runs are left out` : "");
      this.#draw();
    } catch (error) {
      sum.textContent = error.message;
    }
  }

  #draw() {
    this.#chosen = -1;
    this.#focus(null);
    const children = new Map();
    this.#runs.forEach((run, i) => {
      const key = run.parent ?? -1;
      if (!children.has(key)) children.set(key, []);
      children.get(key).push(i);
    });
    const order = [];
    const left = (children.get(-1) ?? []).toSorted((a, b) => this.#size(b, children) - this.#size(a, children)).reverse();
    while (left.length) {
      const at = left.pop();
      order.push(at);
      left.push(...(children.get(at) ?? []).toReversed());
    }
    document.getElementById("prefixes").replaceChildren(...order.map((at) => this.#row(at)));
  }

  #size(at, children) {
    return this.#runs[at].blocks.length + (children.get(at) ?? []).reduce((total, child) => total + this.#size(child, children), 0);
  }

  #row(at) {
    const run = this.#runs[at];
    const words = [`${run.blocks.length} block${run.blocks.length > 1 ? "s" : ""}`, `${run.hits} hits`];
    if (run.active) words.push(`${run.active} in use`);
    if (run.evictions) words.push(`${run.evictions} evicted after it`);
    if (run.pinned) words.push("pinned");
    const node = element(
      "li",
      {},
      element(
        "button",
        {
          type: "button",
          class: "plain",
          "aria-pressed": "false",
          onclick: (event) => this.#choose(at, event.currentTarget),
        },
        element("code", {}, run.digest),
        element("span", {}, words.join(" · ")),
      ),
    );
    node.style.setProperty("--depth", String(Math.min(run.depth, MOST_DEPTH)));
    return node;
  }

  #choose(at, button) {
    const again = this.#chosen === at;
    document.querySelectorAll("#prefixes [aria-pressed=true]").forEach((each) => each.setAttribute("aria-pressed", "false"));
    this.#chosen = again ? -1 : at;
    button.setAttribute("aria-pressed", String(!again));
    if (again) {
      this.#focus(null);
      return;
    }
    const places = [];
    for (let i = at; i !== null; i = this.#runs[i].parent) places.push(...this.#runs[i].blocks);
    this.#focus(places);
    this.#show(this.#runs[at].blocks[0]);
  }

  /** By place, the text that the block belongs to, or -1. */
  byPlace(model) {
    const texts = new Int32Array(model.size).fill(-1);
    for (const { blocks, root } of this.#runs) for (const block of blocks) texts[block] = root;
    return texts;
  }
}
