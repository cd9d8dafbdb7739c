// The block that is pointed at: what the stream says of it at once, and what the server adds.

import { element } from "../dom.js";
import { STATES } from "./updates.js";

const ASK_AFTER_MS = 150; // a pointer that passes over a thousand blocks asks for none of them

export class BlockCard {
  #box;
  #ask;
  #place = -1;
  #timer = 0;
  #detail = null; // {place, state, references, reply}
  #drawn = "";

  constructor(box, ask) {
    this.#box = box;
    this.#ask = ask;
  }

  show(place, model) {
    if (!model) return;
    if (place !== this.#place) {
      this.#place = place;
      this.#detail = null;
      this.#askSoon(model);
    }
    this.#draw(model);
  }

  /** The model has changed. */
  refresh(model) {
    if (this.#place < 0 || this.#place >= model.size) return;
    const { detail, state, references } = { detail: this.#detail, ...this.#stand(model) };
    if (detail && (detail.state !== state || detail.references !== references)) this.#askSoon(model);
    this.#draw(model);
  }

  #stand(model) {
    return { state: model.states[this.#place], references: model.references[this.#place] };
  }

  #askSoon(model) {
    clearTimeout(this.#timer);
    const place = this.#place;
    if (place < 0 || model.states[place] === 0) return;
    this.#timer = setTimeout(async () => {
      const host = place >= model.numBlocks;
      const stand = this.#stand(model);
      const path = host ? `/v1/blocks/host/${place - model.numBlocks}` : `/v1/blocks/device/${place}`;
      const reply = await this.#ask(path).catch((error) => ({ problem: error.message }));
      if (this.#place !== place) return;
      this.#detail = { place, ...stand, reply };
      this.#draw(model);
    }, ASK_AFTER_MS);
  }

  #draw(model) {
    const place = this.#place;
    if (place < 0 || place >= model.size) return this.#put([element("p", { class: "hint" }, "Point at a block, or tap it.")]);
    const host = place >= model.numBlocks;
    const { state, references } = this.#stand(model);
    const holders = model.holders(place);
    const reply = this.#detail?.reply ?? {};
    const rows = [
      ["State", STATES[state] === "transfer" ? "in transfer" : STATES[state]],
      ["References", String(references === 255 ? "255 or more" : references)],
      ["Since", sinceWhen(model.since[place], model.at)],
      ["Held by", holders.length ? holders.map(({ request, index, logical }) => `request ${request}.${index} as its block ${logical}`).join(", ") : "nobody"],
    ];
    if (reply.position !== null && reply.position !== undefined) {
      rows.push(["Tokens from", `${reply.position.toLocaleString("en")} of its sequence`]);
    }
    if (reply.digest) rows.push(["Digest", reply.digest]);
    const parts = [
      element("h2", {}, host ? `Host block ${place - model.numBlocks}` : `Block ${place}`),
      element("dl", {}, ...rows.flatMap(([word, value]) => [element("dt", {}, word), element("dd", {}, value)])),
    ];
    if (reply.text) parts.push(element("pre", { class: "block-text", tabindex: "0", "aria-label": "Its text" }, reply.text));
    else if (reply.digest) parts.push(element("p", { class: "hint" }, "Its tokens are another key's."));
    if (reply.problem) parts.push(element("p", { class: "problem" }, reply.problem));
    this.#put(parts);
  }

  /** Only what is different is announced again. */
  #put(parts) {
    const drawn = parts.map((part) => part.textContent).join("\n");
    if (drawn === this.#drawn) return;
    this.#drawn = drawn;
    this.#box.replaceChildren(...parts);
  }
}

function sinceWhen(since, now) {
  if (Number.isNaN(since)) return "before this was watched";
  const seconds = Math.max(0, now - since);
  const time = new Date(since * 1000).toLocaleTimeString();
  return seconds < 1 ? `${time}, just now` : `${time}, ${Math.round(seconds)} s ago`;
}
