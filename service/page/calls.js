// The functions that an answer calls, as data.

/** Adds what a stream tells of calls to what it told before. */
export function takeCalls(calls, news) {
  for (const { index, id, function: { name = "", arguments: more = "" } = {} } of news) {
    calls[index] ??= { id, type: "function", function: { name: "", arguments: "" } };
    calls[index].function.name += name;
    calls[index].function.arguments += more;
  }
}

/** Whether calls that were stored, or came in a file, are well-formed. */
export function areCalls(value) {
  const isText = (text) => typeof text === "string";
  return Array.isArray(value) && value.every((call) => [call?.id, call?.function?.name, call?.function?.arguments].every(isText));
}

/** As many characters as calls have, which tells of two copies the one that is further on. */
export const lengthOf = (calls) => calls.reduce((sum, { function: { arguments: text } }) => sum + 1 + text.length, 0);
