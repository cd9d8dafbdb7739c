// The functions that a chat offers to the model, as the user writes them: the `tools` of the API, in JSON.

const FORM = '[{"type": "function", "function": {"name": "…"}}]';

/** What is wrong with the text, in words; empty if nothing is. */
export function problemOf(text) {
  if (text.trim() === "") return "";
  let tools;
  try {
    tools = JSON.parse(text);
  } catch (error) {
    return `This is no JSON: ${error.message}.`;
  }
  const isTool = (tool) => tool?.type === "function" && typeof tool.function?.name === "string";
  if (!Array.isArray(tools) || tools.length === 0 || !tools.every(isTool)) return `Tools are a list such as ${FORM}.`;
  return "";
}

/** The fields of a request for those that are on; none if they are off. */
export function offered({ tools = "", tools_off: off = false }) {
  return off || tools.trim() === "" ? {} : { tools: JSON.parse(tools) };
}
