// The official `openai` package for Node.js drives the demo model: plain, streamed, parsed, tools, errors, abort.
// What each call returns is as the package's README and helpers.md say. HEADRACE_URL is the base URL.

import assert from "node:assert/strict";
import { test } from "node:test";

import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const client = new OpenAI({ baseURL: process.env.HEADRACE_URL, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "What is the capital of France?" }];
const ask = { model: "smollm2", messages, temperature: 0, max_tokens: 8 };
const whole = { ...ask, max_tokens: 80 };
const count = { model: "smollm2", prompt: "One, two, three,", temperature: 0, max_tokens: 3 };
const endless = { ...ask, max_tokens: 8000, ignore_eos: true };
const Trip = z.object({ city: z.enum(["Rome", "Oslo"]), days: z.number().int().min(1).max(9) });
const City = z.object({ city: z.enum(["Rome", "Oslo"]) });
const weather = zodFunction({ name: "weather", parameters: City, function: ({ city }) => `21 degrees in ${city}` });
const named = { type: "function", function: { name: "weather" } };

async function all(stream) {
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  return chunks;
}

test("chat: plain, streamed and by the helper", async () => {
  const { data: plain, response, request_id } = await client.chat.completions
    .create({ ...ask, logprobs: true, top_logprobs: 2 })
    .withResponse();
  assert.match(plain.choices[0].message.content, /Paris/);
  assert.equal(request_id, response.headers.get("x-request-id"));
  const options = { stream: true, stream_options: { include_usage: true }, logprobs: true, top_logprobs: 2 };
  const chunks = await all(await client.chat.completions.create({ ...ask, ...options }));
  const text = chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join("");
  assert.equal(text, plain.choices[0].message.content);
  const tokens = chunks.flatMap((chunk) => chunk.choices[0]?.logprobs?.content ?? []).map((one) => one.token);
  assert.deepEqual(tokens, plain.choices[0].logprobs.content.map((one) => one.token));
  assert.equal(chunks.at(-1).usage.total_tokens, plain.usage.total_tokens);
  const deltas = [];
  const helper = client.chat.completions.stream(ask).on("content", (delta) => deltas.push(delta));
  const final = await helper.finalChatCompletion();
  assert.equal(final.choices[0].message.content, text);
  assert.equal(deltas.join(""), text);
  assert.equal(final.choices[0].finish_reason, plain.choices[0].finish_reason);
});

test("structured output is parsed", async () => {
  const format = { ...whole, response_format: zodResponseFormat(Trip, "trip") };
  const plain = (await client.chat.completions.parse(format)).choices[0].message.parsed;
  assert.deepEqual(Trip.parse(plain), plain);
  const streamed = await client.chat.completions.stream(format).finalChatCompletion();
  assert.deepEqual(streamed.choices[0].message.parsed, plain);
});

test("tools: parsed, streamed, run, and their results answered", async () => {
  const calling = { ...whole, tools: [weather], tool_choice: named };
  const plain = (await client.chat.completions.parse(calling)).choices[0];
  const [call] = plain.message.tool_calls;
  assert.equal(plain.finish_reason, "tool_calls");
  assert.deepEqual(City.parse(call.function.parsed_arguments), call.function.parsed_arguments);
  const chunks = await all(await client.chat.completions.create({ ...calling, stream: true }));
  const pieces = chunks.flatMap((chunk) => chunk.choices[0].delta.tool_calls ?? []);
  assert.equal(pieces.filter((piece) => piece.id !== undefined).length, 1);
  assert.equal(pieces.filter((piece) => piece.function.name !== undefined).length, 1);
  assert.equal(pieces.map((piece) => piece.function.arguments).join(""), call.function.arguments);
  const result = { role: "tool", tool_call_id: call.id, content: "21 degrees" };
  const last = await client.chat.completions.create({ ...ask, messages: [...messages, plain.message, result] });
  assert.ok(last.choices[0].message.content);
  const runner = client.chat.completions.runTools({ ...whole, tools: [weather], tool_choice: named });
  await runner.done();
  assert.ok(runner.messages.some((message) => message.role === "tool" && message.content.startsWith("21 degrees in")));
});

test("completions and models", async () => {
  const plain = await client.completions.create({ ...count, echo: true, logprobs: 1 });
  assert.match(plain.choices[0].text, /^One, two, three,.*four/);
  assert.equal(plain.choices[0].logprobs.token_logprobs[0], null);
  const chunks = await all(await client.completions.create({ ...count, echo: true, stream: true }));
  assert.equal(chunks.map((chunk) => chunk.choices[0].text).join(""), plain.choices[0].text);
  const models = await all(await client.models.list());
  assert.ok(models.some((model) => model.id === "smollm2"));
  assert.equal((await client.models.retrieve("smollm2")).object, "model");
});

test("errors are of the package's classes", async () => {
  await assert.rejects(client.chat.completions.create({ ...ask, model: "nobody" }), (error) => {
    assert.ok(error instanceof OpenAI.NotFoundError);
    assert.deepEqual([error.code, error.param, error.status], ["model_not_found", "model", 404]);
    assert.ok(error.requestID);
    return true;
  });
  const long = [{ role: "user", content: "word ".repeat(9000) }];
  for (const stream of [false, true]) {
    await assert.rejects(client.chat.completions.create({ ...ask, messages: long, stream }), {
      code: "context_length_exceeded",
      message: /8192/,
    });
  }
  await assert.rejects(client.completions.create({ ...count, suffix: "x" }), { code: "unsupported_parameter" });
  const hurried = client.chat.completions.create(endless, { timeout: 200 });
  await assert.rejects(hurried, OpenAI.APIConnectionTimeoutError);
});

test("an abort ends it, and so does leaving the loop", async () => {
  for (const leave of [(stream) => stream.controller.abort(), () => undefined]) {
    const stream = await client.chat.completions.create({ ...endless, stream: true });
    let seen = 0;
    for await (const _ of stream) {
      seen += 1;
      if (seen === 3) {
        leave(stream);
        break;
      }
    }
    assert.equal(seen, 3);
  }
  const helper = client.chat.completions.stream(endless);
  helper.once("content", () => helper.abort());
  await assert.rejects(helper.finalChatCompletion(), OpenAI.APIUserAbortError);
});
