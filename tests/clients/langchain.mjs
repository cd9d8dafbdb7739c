// LangChain.js: a tool is called, and its result goes back; the answer is streamed.
import { HumanMessage } from "@langchain/core/messages";
import { tool } from "@langchain/core/tools";
import { ChatOpenAI } from "@langchain/openai";
import { z } from "zod";

const [, url] = process.argv.slice(2);
const model = new ChatOpenAI({ model: "tiny", apiKey: "none", configuration: { baseURL: `${url}/v1` } });
const weather = tool(async ({ city }) => `21 degrees in ${city}`, {
  name: "get_weather",
  description: "Tell how warm it is.",
  schema: z.object({ city: z.string() }),
});
const said = [new HumanMessage({ content: "How warm is it in Bern?", name: "ann" })];
said.push(await model.bindTools([weather]).invoke(said));
said.push(await weather.invoke(said[1].tool_calls[0]));
const whole = await model.invoke(said);
let streamed = "";
for await (const chunk of await model.stream(said)) streamed += chunk.content;
console.log(JSON.stringify({ whole: whole.content, steps: 2, streamed }));
