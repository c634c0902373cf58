// The Vercel AI SDK against a running server: node ai_sdk.mjs http://127.0.0.1:PORT
//
// For each of its providers a loop with a tool that has to be called once, whole and streamed, and an object by a schema. Run
// from a folder that has the packages. Prints one line a check and exits with 1 if one failed.

import assert from "node:assert";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const packages = createRequire(`${process.cwd()}/package.json`);
const load = async (name) => import(pathToFileURL(packages.resolve(name)));
const { generateObject, generateText, stepCountIs, streamText, tool } = await load("ai");
const { createAnthropic } = await load("@ai-sdk/anthropic");
const { createOpenAI } = await load("@ai-sdk/openai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { z } = await load("zod");

globalThis.AI_SDK_LOG_WARNINGS = false;
const base = process.argv[2];
const openai = createOpenAI({ baseURL: `${base}/v1`, apiKey: "none" });
const compatible = createOpenAICompatible({ name: "muser", baseURL: `${base}/v1`, supportsStructuredOutputs: true });
const anthropic = createAnthropic({ baseURL: `${base}/v1`, apiKey: "none" });
const models = {
  compatible: compatible("muse-tiny"),
  responses: openai("muse-tiny"),
  chat: openai.chat("muse-tiny"),
  anthropic: anthropic("muse-tiny"),
  // By this name it takes the schema as `output_config.format`, and not as a tool.
  anthropic_native: anthropic("claude-sonnet-4-5"),
};

// `notes` is what zod makes `propertyNames` of; `city` keeps the small model to a sensible value.
const inputSchema = z.object({ city: z.enum(["Paris", "Rome"]), notes: z.record(z.string(), z.string()).optional() });
// The anthropic provider turns limits of numbers into words, which nothing enforces.
const animal = z.object({ wild: z.boolean(), kind: z.enum(["fox", "dog"]) });
const common = { temperature: 0, maxOutputTokens: 300, maxRetries: 0 };

function loopSettings(model, asked) {
  const weather = tool({
    description: "The weather of a city.",
    inputSchema,
    execute: async ({ city }) => {
      asked.push(city);
      return { city, degrees: 14 };
    },
  });
  return {
    ...common,
    model,
    tools: { weather },
    prompt: "What is the weather in Paris?",
    stopWhen: stepCountIs(3),
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
  };
}

function checkLoop(steps, finishReason, asked) {
  const calls = steps[0].toolCalls;
  assert.ok(calls.length >= 1 && calls.every((call) => call.toolName === "weather" && !call.invalid), JSON.stringify(calls));
  assert.equal(asked.length, calls.length);
  assert.equal(steps[0].finishReason, "tool-calls");
  assert.equal(steps.length, 2, "the second step answers");
  assert.ok(["stop", "length"].includes(finishReason), finishReason);
}

const checks = {
  async loop(model) {
    const asked = [];
    const result = await generateText(loopSettings(model, asked));
    checkLoop(result.steps, result.finishReason, asked);
  },
  async streamed_loop(model) {
    const asked = [];
    const result = streamText({ ...loopSettings(model, asked), onError: () => {} });
    const parts = [];
    for await (const part of result.fullStream) parts.push(part);
    const fault = parts.find((part) => part.type === "error");
    assert.ok(!fault, String(fault?.error));
    checkLoop(await result.steps, await result.finishReason, asked);
  },
  async object(model) {
    const { object } = await generateObject({ ...common, model, schema: animal, prompt: "Invent an animal." });
    assert.ok(typeof object.wild === "boolean" && ["fox", "dog"].includes(object.kind), JSON.stringify(object));
  },
};

let failed = 0;
for (const [provider, model] of Object.entries(models)) {
  for (const [name, check] of Object.entries(checks)) {
    const began = Date.now();
    try {
      await check(model);
      console.log(`ok   ai_sdk ${provider} ${name} ${((Date.now() - began) / 1000).toFixed(1)} s`);
    } catch (fault) {
      failed += 1;
      console.log(`FAIL ai_sdk ${provider} ${name}: ${fault.message} ${fault.responseBody ?? ""}`);
    }
  }
}
process.exit(failed ? 1 : 0);
