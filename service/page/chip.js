// The chip beside the title: the model, how much of its context the chat fills, how much of the prompt was cached.

const STATES = { connecting: "connecting", loading: "loading", offline: "not connected", locked: "locked" };

const chip = document.getElementById("model");
const name = document.getElementById("model-name");
const context = document.getElementById("model-context");
const cache = document.getElementById("model-cache");

/** A Hub id without its owner, a folder without those that it is in. */
export function shortName(id) {
  return id.replace(/\/+$/, "").split("/").at(-1) || id;
}

/** `model` is null until the server has told it. */
export function showState(phase, model) {
  chip.dataset.phase = phase;
  name.textContent = model ? shortName(model.id) : (STATES[phase] ?? phase);
  if (model) chip.title = model.id + (model.max_model_len ? `, context of ${number(model.max_model_len)} tokens` : "");
}

/** `branch` are the messages that are shown. */
export function showUse(model, branch) {
  const stats = branch.findLast((message) => message.stats?.promptTokens !== undefined)?.stats;
  const length = model?.max_model_len;
  context.hidden = !length;
  cache.hidden = !stats;
  if (length) {
    const used = stats ? stats.promptTokens + stats.completionTokens : 0;
    context.textContent = stats ? `${number(used)} of ${number(length)}` : `${number(length)} tokens`;
    context.title = stats ? "Tokens of this chat, of those that the context holds" : "Tokens that the context holds";
  }
  if (stats) {
    cache.textContent = `${Math.round((100 * stats.cachedTokens) / Math.max(stats.promptTokens, 1))} % cached`;
    cache.title = "Share of the last prompt that was in the KV cache already";
  }
}

const number = (n) => n.toLocaleString("en");
