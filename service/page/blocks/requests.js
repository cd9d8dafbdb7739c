// The requests that hold blocks, their sequences' block tables, and what these share.

import { element } from "../dom.js";
import { count } from "../figures.js";

const MOST_REQUESTS = 100;
const MOST_BLOCKS = 400; // of a table, as chips

export class Requests {
  #list = document.getElementById("requests");
  #tables = document.getElementById("tables");
  #focus;
  #show;
  #chosen = null;
  #drawn = "";

  /** focus(places or null) lets blocks stand out; show(place) shows one. */
  constructor(focus, show) {
    this.#focus = focus;
    this.#show = show;
  }

  show(model) {
    const requests = [...model.requests()];
    document.getElementById("no-requests").hidden = requests.length > 0;
    if (this.#chosen !== null && !requests.some(([request]) => request === this.#chosen)) this.#choose(null, model);
    const shown = requests.slice(0, MOST_REQUESTS);
    const key = shown.map(([request, sequences]) => `${request}:${sequences.map((s) => `${s.state}${s.tokens ?? s.blocks.length}`)}`).join() + this.#chosen;
    if (key === this.#drawn) return;
    this.#drawn = key;
    const focused = document.activeElement?.dataset?.request;
    this.#list.replaceChildren(...shown.map(([request, sequences]) => this.#row(request, sequences, model)));
    if (requests.length > shown.length) this.#list.append(element("li", { class: "hint" }, `and ${requests.length - shown.length} more`));
    if (focused !== undefined) this.#list.querySelector(`[data-request="${focused}"]`)?.focus();
    if (this.#chosen !== null) this.#drawTables(model);
  }

  #row(request, sequences, model) {
    const { distinct, named } = sharing(sequences);
    const words = [sequences[0].state, count(sequences.length, "sequence"), count(distinct, "block")];
    if (named > distinct) words.push(`${named - distinct} saved by sharing`);
    return element(
      "li",
      {},
      element(
        "button",
        { type: "button", class: "plain", "data-request": request, "aria-pressed": String(request === this.#chosen), onclick: () => this.#choose(request === this.#chosen ? null : request, model) },
        element("strong", {}, `Request ${request}`),
        element("span", {}, words.join(" · ")),
      ),
    );
  }

  #choose(request, model) {
    this.#chosen = request;
    this.#drawn = "";
    if (request === null) {
      this.#tables.replaceChildren();
      this.#focus(null);
    }
    this.show(model);
  }

  #drawTables(model) {
    const sequences = model.requests().get(this.#chosen) ?? [];
    const places = [];
    for (const { blocks, host_blocks: host } of sequences) {
      places.push(...blocks, ...Array.from(host, (block) => model.numBlocks + block));
    }
    this.#focus(places);
    const shared = commonStart(sequences);
    const parts = [element("h3", {}, `Request ${this.#chosen}`)];
    if (sequences.length > 1) {
      parts.push(element("p", { class: "hint" }, `All ${sequences.length} sequences begin with the same ${count(shared, "block")}; a block with a dot is named by several.`));
    }
    for (const table of sequences) parts.push(this.#table(table, sequences, model));
    this.#tables.replaceChildren(...parts);
  }

  #table({ index, tokens, blocks, host_blocks: host }, sequences, model) {
    const onHost = blocks.length === 0 && host.length > 0;
    const list = Array.from(onHost ? host : blocks);
    const parent = parentOf(index, sequences);
    const chips = list.slice(0, MOST_BLOCKS).map((block) => {
      const place = onHost ? model.numBlocks + block : block;
      const several = model.references[place] > 1;
      return element(
        "button",
        { type: "button", class: several ? "chip shared" : "chip", "aria-label": `Block ${block}${several ? `, ${model.references[place]} references` : ""}`, onclick: () => this.#show(place) },
        String(block),
      );
    });
    if (list.length > MOST_BLOCKS) chips.push(element("span", { class: "hint" }, `and ${list.length - MOST_BLOCKS} more`));
    const length = tokens === null ? count(list.length, "block") : count(tokens, "token");
    const shares = parent ? `, shares ${count(parent.count, "block")} with sequence ${parent.index}` : "";
    const words = `Sequence ${index}: ${length}${onHost ? ", in host memory" : ""}${shares}`;
    return element("div", { class: parent ? "branch" : "branch root" }, element("p", {}, words), element("div", { class: "chips" }, ...chips));
  }
}

function sharing(sequences) {
  const all = new Set();
  let named = 0;
  for (const { blocks, host_blocks: host } of sequences) {
    for (const block of blocks) all.add(block);
    for (const block of host) all.add(`h${block}`);
    named += blocks.length + host.length;
  }
  return { distinct: all.size, named };
}

const same = (a, b) => {
  let count = 0;
  while (count < Math.min(a.length, b.length) && a[count] === b[count]) count += 1;
  return count;
};

function commonStart(sequences) {
  return Math.min(...sequences.map(({ blocks }) => same(blocks, sequences[0].blocks)));
}

/** The earlier sequence of the request that this one shares most blocks with. */
function parentOf(index, sequences) {
  const own = sequences.find((table) => table.index === index);
  let best = null;
  for (const other of sequences) {
    if (other.index >= index) break;
    const count = same(own.blocks, other.blocks);
    if (count > 0 && (best === null || count > best.count)) best = { index: other.index, count };
  }
  return best;
}
