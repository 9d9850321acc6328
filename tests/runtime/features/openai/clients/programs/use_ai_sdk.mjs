// A text, its stream, a typed answer, and steps with a tool, as the AI SDK's first pages have them.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const model = createOpenAICompatible({
  name: "tsx",
  baseURL: process.env.OPENAI_BASE_URL,
  apiKey: process.env.OPENAI_API_KEY,
  includeUsage: true,
  supportsStructuredOutputs: true,
}).chatModel("tiny");
const prompt = "Write a vegetarian lasagna recipe for 4 people.";
const request = { model, prompt, maxOutputTokens: 24 };

const { text } = await generateText(request);
const stream = streamText(request);
let streamed = "";
for await (const delta of stream.textStream) streamed += delta;

const schema = z.object({
  name: z.string().max(12),
  ingredients: z.array(z.object({ name: z.string().max(12) })).max(2),
});
const output = Output.object({ schema });
const recipe = (await generateText({ model, prompt, output })).output;
const partial = streamText({ model, prompt, output });
let streamedRecipe;
for await (const part of partial.partialOutputStream) streamedRecipe = part;

const weather = tool({
  description: "Get the weather in a location",
  inputSchema: z.object({ location: z.string().max(12) }),
  execute: async ({ location }) => ({ location, temperature: 72 }),
});
const loop = {
  ...{ model, prompt: "What is the weather?", tools: { weather }, maxOutputTokens: 200 },
  stopWhen: stepCountIs(2),
  prepareStep: ({ stepNumber }) => ({
    toolChoice: stepNumber ? "none" : { type: "tool", toolName: "weather" },
  }),
};
const outline = (steps) =>
  steps.map((step) => [step.finishReason, step.toolResults.map((result) => result.output)]);
const steps = outline((await generateText(loop)).steps);
const streamedSteps = outline(await streamText(loop).steps);

const usage = await stream.usage;
console.log(
  JSON.stringify({
    ...{ text, streamed, recipe, streamedRecipe, steps, streamedSteps },
    outputTokens: usage.outputTokens,
  }),
);
