// The figures under an answer, each with an explanation as its tooltip.

import { element } from "./dom.js";

export function figures({ stats = {}, earlier = 0 }) {
  const items = [];
  const add = (text, title) => items.push(element("span", { title }, text));
  if (stats.tokensPerSecond) add(`${rounded(stats.tokensPerSecond)} tokens/s`, "Tokens after the first, per second");
  if (stats.firstTokenMs !== undefined) {
    add(`first token ${duration(stats.firstTokenMs)}`, "From sending the question to the first text");
  }
  if (stats.completionTokens !== undefined) add(count(earlier + stats.completionTokens, "token"), "Length of the answer");
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

/** So many of them, in words. */
export const count = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;
const rounded = (n) => (n < 10 ? n.toFixed(1) : Math.round(n).toLocaleString("en"));
const duration = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`);
