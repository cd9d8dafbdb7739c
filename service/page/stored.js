// What is well-formed of a conversation that was stored, perhaps by another version of this page, or came in a file.

import { areCalls } from "./calls.js";
import { settingsFrom } from "./settings.js";

const isText = (value) => typeof value === "string";
const { isFinite: isNumber } = Number;

// What not every message has, and what it is.
const OPTIONAL = {
  reasoning: isText,
  finishReason: isText,
  group: isText,
  stream: isText,
  at: isText,
  request: isText,
  part: isNumber,
  earlier: isNumber,
  choice: isNumber,
  times: (value) => isNumber(value?.sent),
};

/** Whether each has what every message has, and follows its parent. */
export function areMessages(values) {
  if (!Array.isArray(values)) return false;
  const known = new Set();
  return values.every((value) => {
    const fits =
      isText(value?.id) &&
      isText(value.content) &&
      (value.role === "user" || value.role === "assistant") &&
      isText(value.status) &&
      (value.status !== "error" || isText(value.error?.message)) &&
      (value.calls === undefined || areCalls(value.calls)) &&
      (value.parent === null || known.has(value.parent)) &&
      !known.has(value.id);
    known.add(value?.id);
    return fits;
  });
}

/** The message without what is malformed of the rest. */
export function messageFrom(stored) {
  const isSound = ([name, value]) => !(name in OPTIONAL) || OPTIONAL[name](value);
  const message = Object.fromEntries(Object.entries(stored).filter(isSound));
  if ("stats" in message) message.stats = numbersOf(message.stats);
  return message;
}

/** What the user set of the conversation, in the same way. */
export function aboutFrom(stored) {
  const { name, settings, at } = stored ?? {};
  return {
    ...(isText(name) && { name }),
    ...(settings && { settings: settingsFrom(settings) }),
    ...(isNumber(at) && { at }),
  };
}

const numbersOf = (values) => Object.fromEntries(Object.entries(values ?? {}).filter(([, value]) => isNumber(value)));
