// What LibreChat asks of a model, by the package that does it for its server: a conversation with a tool, and its title.
// The first argument is the provider; of openAI's, the third is the endpoint as librechat.yaml has it.
import { createContentAggregator, GraphEvents, ModelEndHandler, Run, ToolEndHandler } from "@librechat/agents";
import { HumanMessage } from "@librechat/agents/langchain/messages";
import { tool } from "@librechat/agents/langchain/tools";
import { configSchema } from "librechat-data-provider";

const [provider, url, given] = process.argv.slice(2);

// As LibreChat fills them, with what its page sends for a new conversation.
const asked = { model: "tiny", streaming: true };
let models = [];
let clientOptions;
if (provider === "anthropic") {
  const metadata = { user_id: "ann" };
  clientOptions = {
    ...{ ...asked, stream: true, apiKey: "none", maxTokens: 8192, invocationKwargs: { metadata } },
    ...{ anthropicApiUrl: url, clientOptions: { baseURL: url } },
  };
} else {
  const [endpoint] = configSchema.parse(JSON.parse(given)).endpoints.custom;
  const { apiKey, baseURL } = endpoint;
  const listed = await fetch(`${baseURL}/models`, { headers: { Authorization: `Bearer ${apiKey}` } });
  models = (await listed.json()).data.map((model) => model.id);
  const configuration = { baseURL };
  clientOptions = { ...asked, user: "ann", apiKey, configuration, streamUsage: false, usage: true };
  for (const name of endpoint.dropParams ?? []) delete clientOptions[name];
}

const weather = tool(async ({ city }) => `21 degrees in ${city}`, {
  name: "get_weather",
  description: "Tell how warm it is.",
  schema: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
});
const { contentParts, aggregateContent } = createContentAggregator();
const usage = [];
let streamed = "";
let thought = "";
const shown = {
  handle: (event, data) => {
    aggregateContent({ event, data });
    for (const part of data.delta?.content ?? []) {
      if (event === GraphEvents.ON_MESSAGE_DELTA) streamed += part.text ?? "";
      if (event === GraphEvents.ON_REASONING_DELTA) thought += part.think ?? "";
    }
  },
};
const customHandlers = {
  [GraphEvents.TOOL_END]: new ToolEndHandler(),
  [GraphEvents.CHAT_MODEL_END]: new ModelEndHandler(usage),
  [GraphEvents.ON_RUN_STEP]: shown,
  [GraphEvents.ON_RUN_STEP_DELTA]: shown,
  [GraphEvents.ON_RUN_STEP_COMPLETED]: shown,
  [GraphEvents.ON_MESSAGE_DELTA]: shown,
  [GraphEvents.ON_REASONING_DELTA]: shown,
};
const agent = { agentId: "a", provider, clientOptions, tools: [weather], instructions: "Be brief." };
const run = await Run.create({
  runId: "r",
  graphConfig: { type: "standard", agents: [{ ...agent, reasoningKey: "reasoning_content" }] },
  returnContent: true,
  customHandlers,
});
const question = "How warm is it in Bern?";
const config = { configurable: { user_id: "ann", thread_id: "c" }, streamMode: "values", version: "v2" };
await run.processStream({ messages: [new HumanMessage(question)] }, config);

const titles = {};
for (const titleMethod of ["completion", "functions"]) {
  const { streaming, ...options } = clientOptions; // a title comes whole
  const about = { provider, inputText: question, contentParts, titleMethod, clientOptions: options };
  titles[titleMethod] = (await run.generateTitle({ ...about, chainOptions: {} })).title;
}
const whole = contentParts.filter((part) => part?.type === "text").at(-1)?.text;
const tools = contentParts.filter((part) => part?.type === "tool_call").map((part) => part.tool_call.output);
const tokens = usage.map((each) => each.output_tokens);
console.log(JSON.stringify({ models, whole, streamed, thought, tools, titles, tokens }));
process.exit(0); // the package keeps timers
