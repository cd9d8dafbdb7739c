// What is sent to the server for an answer: {path, body}.

import { tokenize } from "./api.js";
import { samplingOf } from "./settings.js";
import { offered } from "./tools.js";

/**
 * The request for the answers of one stream: the samples of a question, or one, which continues what it has already.
 * Samples that have streams of their own get other seeds, by the `index` of the first one.
 */
export async function requestFor(conversation, answers, model, index, signal) {
  const [message] = answers;
  const settings = conversation.settings ?? {};
  const sampling = samplingOf(settings);
  if (answers.length > 1) sampling.n = answers.length;
  if (index > 0 && sampling.seed !== undefined) sampling.seed += index;
  const turns = conversation.turnsBefore(message);
  if (model.continues) {
    const text = [...turns, message].map(({ content }) => content).join("");
    return completion(model, await tokenize({ model: model.id, prompt: text }, signal), sampling);
  }
  const system = settings.system?.trim() ? [{ role: "system", content: settings.system }] : [];
  const messages = [...system, ...turns];
  const tools = offered(settings);
  if (message.content === "") {
    return { path: "/v1/chat/completions", body: { model: model.id, messages, ...tools, ...sampling } };
  }
  // The answer goes on behind its own tokens. A grammar would begin anew there.
  const { chat_template_kwargs: kwargs, response_format: _, ...rest } = sampling;
  const begun = { model: model.id, messages, ...tools, ...(kwargs && { chat_template_kwargs: kwargs }) };
  const prompt = await tokenize(begun, signal);
  const said = await tokenize({ model: model.id, prompt: message.content, add_special_tokens: false }, signal);
  return completion(model, [...prompt, ...said], rest);
}

/** Without a limit the text may become as long as the context allows. */
function completion(model, prompt, { chat_template_kwargs: _, ...sampling }) {
  const room = Math.max(model.max_model_len - prompt.length, 1);
  return { path: "/v1/completions", body: { model: model.id, prompt, max_tokens: room, ...sampling } };
}
