// The official `openai` package for Node.js and responses: plain, streamed, parsed, tools, a conversation, the background.
// As OpenAI's guides "Responses", "Conversation state" and "Background mode" have it. HEADRACE_URL is the base URL.

import assert from "node:assert/strict";
import { test } from "node:test";
import { setTimeout } from "node:timers/promises";

import OpenAI from "openai";
import { zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const client = new OpenAI({ baseURL: process.env.HEADRACE_URL, apiKey: "none", maxRetries: 0 });
const ask = { model: "smollm2", input: "What is the capital of France?", temperature: 0, max_output_tokens: 16 };
const whole = { ...ask, max_output_tokens: 80 };
const City = z.object({ city: z.enum(["Rome", "Oslo"]) });
const parameters = {
  type: "object",
  properties: { city: { type: "string", enum: ["Rome", "Oslo"] } },
  required: ["city"],
  additionalProperties: false,
};
const tools = [{ type: "function", name: "weather", parameters, strict: true }];
const calling = { ...whole, tools, tool_choice: { type: "function", name: "weather" } };
const BUDGET_MS = 60_000;

async function all(stream) {
  const events = [];
  for await (const event of stream) events.push(event);
  return events;
}

async function ended(response) {
  const deadline = Date.now() + BUDGET_MS;
  while (["queued", "in_progress"].includes(response.status)) {
    assert.ok(Date.now() < deadline, JSON.stringify(response));
    await setTimeout(100);
    response = await client.responses.retrieve(response.id);
  }
  return response;
}

test("plain, streamed and by the helper", async () => {
  const plain = await client.responses.create(ask);
  assert.match(plain.output_text, /Paris/);
  const events = await all(await client.responses.create({ ...ask, stream: true }));
  assert.deepEqual(events.map((event) => event.sequence_number), events.map((_, number) => number));
  const text = events.filter((event) => event.type === "response.output_text.delta").map((event) => event.delta).join("");
  assert.equal(text, plain.output_text);
  const last = events.at(-1);
  assert.equal(last.response.status, plain.status);
  assert.equal(last.response.usage.total_tokens, plain.usage.total_tokens);
  const final = await client.responses.stream(ask).finalResponse();
  assert.equal(final.output_text, plain.output_text);
});

test("structured output is parsed", async () => {
  const parsed = await client.responses.parse({ ...whole, text: { format: zodTextFormat(City, "city") } });
  assert.deepEqual(City.parse(parsed.output_parsed), parsed.output_parsed);
});

test("a call, and its result in the next turn", async () => {
  const first = await client.responses.create(calling);
  const [call] = first.output;
  assert.deepEqual([call.type, call.name], ["function_call", "weather"]);
  City.parse(JSON.parse(call.arguments));
  const events = await all(await client.responses.create({ ...calling, stream: true }));
  const pieces = events.filter((event) => event.type === "response.function_call_arguments.delta");
  assert.equal(pieces.map((event) => event.delta).join(""), call.arguments);
  const input = [{ type: "function_call_output", call_id: call.call_id, output: "21 degrees" }];
  const next = await client.responses.create({ ...ask, input, previous_response_id: first.id, tools, tool_choice: "none" });
  assert.ok(next.output_text);
  assert.equal((await client.responses.retrieve(next.id)).output_text, next.output_text);
  const items = await all(client.responses.inputItems.list(next.id));
  assert.ok(items.some((item) => item.type === "function_call_output"));
  await client.responses.delete(next.id);
  await assert.rejects(client.responses.retrieve(next.id), OpenAI.NotFoundError);
});

test("in the background: waited for, watched from where it was left, cancelled", async () => {
  const done = await ended(await client.responses.create({ ...ask, background: true }));
  assert.match(done.output_text, /Paris/);
  const watched = await client.responses.create({ ...ask, background: true, stream: true });
  let id, left;
  for await (const event of watched) {
    id = event.response?.id ?? id;
    left = event.sequence_number;
    if (event.type === "response.output_text.delta") break;
  }
  const rest = await all(await client.responses.retrieve(id, { stream: true, starting_after: left }));
  assert.equal(rest[0].sequence_number, left + 1);
  assert.equal(rest.at(-1).response.output_text ?? rest.at(-1).response.output[0].content[0].text, done.output_text);
  const endless = await client.responses.create({ ...ask, max_output_tokens: 8000, ignore_eos: true, background: true });
  const cancelled = await ended(await client.responses.cancel(endless.id));
  assert.equal(cancelled.status, "cancelled");
});

test("errors are of the package's classes", async () => {
  await assert.rejects(client.responses.create({ ...ask, model: "nobody" }), OpenAI.NotFoundError);
  await assert.rejects(client.responses.create({ ...ask, previous_response_id: "resp_nothing" }), OpenAI.APIError);
  await assert.rejects(client.responses.create({ ...ask, input: "word ".repeat(9000) }), { code: "context_length_exceeded" });
});
