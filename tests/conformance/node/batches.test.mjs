// The official `openai` package for Node.js and batches: files up and down, a batch to its end, one that is cancelled.
// As OpenAI's guide "Batch API" has it. HEADRACE_URL is the base URL.

import assert from "node:assert/strict";
import { test } from "node:test";
import { setTimeout } from "node:timers/promises";

import OpenAI, { toFile } from "openai";

const client = new OpenAI({ baseURL: process.env.HEADRACE_URL, apiKey: "none", maxRetries: 0 });
const BUDGET_MS = 120_000;

function line(name, body) {
  const asked = { model: "smollm2", messages: [{ role: "user", content: name }], max_tokens: 4, temperature: 0, ...body };
  return { custom_id: name, method: "POST", url: "/v1/chat/completions", body: asked };
}

async function begun(lines) {
  const file = await toFile(Buffer.from(lines.map((each) => JSON.stringify(each)).join("\n")), "lines.jsonl");
  const uploaded = await client.files.create({ file, purpose: "batch" });
  return client.batches.create({
    input_file_id: uploaded.id,
    endpoint: "/v1/chat/completions",
    completion_window: "24h",
    metadata: { for: "node" },
  });
}

async function ended(batch) {
  const deadline = Date.now() + BUDGET_MS;
  while (!["completed", "failed", "expired", "cancelled"].includes(batch.status)) {
    assert.ok(Date.now() < deadline, JSON.stringify(batch));
    await setTimeout(100);
    batch = await client.batches.retrieve(batch.id);
  }
  return batch;
}

async function read(id) {
  const text = await (await client.files.content(id)).text();
  return text.trim().split("\n").map((each) => JSON.parse(each));
}

test("a batch, from its file to its files", async () => {
  const batch = await ended(await begun([line("one"), line("two"), line("bad", { temperature: 9 })]));
  assert.equal(batch.status, "completed");
  assert.deepEqual(batch.request_counts, { total: 3, completed: 2, failed: 1 });
  assert.deepEqual(batch.metadata, { for: "node" });
  const told = await read(batch.output_file_id);
  assert.deepEqual(told.map((each) => each.custom_id).sort(), ["one", "two"]);
  const asked = await client.chat.completions.create(line("one").body);
  const one = told.find((each) => each.custom_id === "one");
  assert.equal(one.response.status_code, 200);
  assert.deepEqual(one.response.body.choices, JSON.parse(JSON.stringify(asked.choices)));
  const [bad] = await read(batch.error_file_id);
  assert.equal(bad.custom_id, "bad");
  assert.equal(bad.response?.body.error.code ?? bad.error.code, "invalid_request");
  const listed = [];
  for await (const each of client.batches.list({ limit: 1 })) listed.push(each.id);
  assert.ok(listed.includes(batch.id));
  const input = await client.files.retrieve(batch.input_file_id);
  assert.deepEqual([input.object, input.filename, input.purpose], ["file", "lines.jsonl", "batch"]);
  assert.equal((await client.files.delete(input.id)).deleted, true);
  await assert.rejects(client.files.retrieve(input.id), OpenAI.NotFoundError);
});

test("a batch that is cancelled", async () => {
  const batch = await begun([line("endless", { max_tokens: 8000, ignore_eos: true })]);
  const cancelling = await client.batches.cancel(batch.id);
  assert.ok(["cancelling", "cancelled"].includes(cancelling.status));
  assert.equal((await ended(cancelling)).status, "cancelled");
});

test("what is wrong is told", async () => {
  await assert.rejects(client.batches.retrieve("batch_nothing"), OpenAI.NotFoundError);
  const missing = { input_file_id: "file-nothing", endpoint: "/v1/chat/completions", completion_window: "24h" };
  await assert.rejects(client.batches.create(missing), OpenAI.APIError);
  const file = await toFile(Buffer.from("no JSON"), "lines.jsonl");
  const uploaded = await client.files.create({ file, purpose: "batch" });
  const failed = await ended(await client.batches.create({ ...missing, input_file_id: uploaded.id }));
  assert.equal(failed.status, "failed");
  assert.equal(failed.errors.data[0].line, 1);
});
