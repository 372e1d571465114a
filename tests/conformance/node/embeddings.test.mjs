// The official `openai` package for Node.js and embeddings. HEADRACE_URL is the base URL, HEADRACE_EMBEDDER the model.

import assert from "node:assert/strict";
import { test } from "node:test";

import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.env.HEADRACE_URL, apiKey: "none", maxRetries: 0 });
const model = process.env.HEADRACE_EMBEDDER;
const input = ["A mill.", "Water turns the wheel.", "A mill."];

test("vectors come as base64 and as numbers, in order", async () => {
  const told = await client.embeddings.create({ model, input }); // the package asks for base64, and gives numbers
  const floats = await client.embeddings.create({ model, input, encoding_format: "float" });
  assert.deepEqual(told.data.map((each) => each.index), [0, 1, 2]);
  for (const [index, each] of told.data.entries()) {
    const other = floats.data[index].embedding;
    assert.equal(each.embedding.length, other.length);
    assert.ok(each.embedding.every((number, place) => Math.abs(number - other[place]) < 1e-5));
  }
  assert.deepEqual(told.data[0].embedding, told.data[2].embedding);
  assert.notDeepEqual(told.data[0].embedding, told.data[1].embedding);
  assert.equal(told.usage.total_tokens, told.usage.prompt_tokens);
  assert.ok((await client.models.retrieve(model)).id === model);
});

test("errors are of the package's classes", async () => {
  await assert.rejects(client.embeddings.create({ model: "nobody", input }), OpenAI.NotFoundError);
  await assert.rejects(client.embeddings.create({ model, input: [] }), OpenAI.BadRequestError);
  await assert.rejects(client.embeddings.create({ model: "smollm2", input }), OpenAI.BadRequestError);
});
