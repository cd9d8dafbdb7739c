// Vercel's AI SDK, with the provider that the first argument names: a tool is called, then the answer is streamed.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

globalThis.AI_SDK_LOG_WARNINGS = false; // one says on stdout that it does not know the model

const [provider, url] = process.argv.slice(2);
const baseURL = `${url}/v1`;
const model = {
  openai: () => createOpenAI({ baseURL, apiKey: "none" })("tiny"),
  compatible: () => createOpenAICompatible({ name: "quire", baseURL })("tiny"),
  anthropic: () => createAnthropic({ baseURL, apiKey: "none" })("tiny"),
}[provider]();
const weather = tool({
  description: "Tell how warm it is.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `21 degrees in ${city}`,
});
const asked = { model, prompt: "How warm is it in Bern?", tools: { get_weather: weather }, stopWhen: stepCountIs(3) };
const whole = await generateText(asked);
let streamed = "";
for await (const text of streamText(asked).textStream) streamed += text;
console.log(JSON.stringify({ whole: whole.text, steps: whole.steps.length, streamed }));
