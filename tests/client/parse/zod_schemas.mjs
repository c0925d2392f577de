// Thirty answers as users of zod describe them, each through the openai client's `parse`.
// Usage: node zod_schemas.mjs BASE_URL MODEL; prints one line of JSON a schema, and ends with 1 if one failed.
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const Step = z.object({ explanation: z.string(), output: z.string() });
const Address = z.object({ street: z.string(), zip: z.string().regex(/^\d{5}$/) });
const Cat = z.object({ kind: z.literal("cat"), lives: z.number().int() });
const Dog = z.object({ kind: z.literal("dog"), breed: z.string() });
const Tree = z.object({ name: z.string(), get children() { return z.array(Tree); } });
const Ui = z.object({
  type: z.enum(["div", "button"]),
  label: z.string(),
  get children() { return z.array(Ui); },
});
const List = z.object({ value: z.number(), get next() { return List.nullable(); } });

const schemas = {
  capital: z.object({ city: z.string(), isCapital: z.boolean(), people: z.number() }),
  described: z.object({ title: z.string().describe("A title"), year: z.number().int().min(1800).max(2100) }),
  nullable: z.object({ name: z.string().nullable(), age: z.number().nullable() }),
  defaults: z.object({ unit: z.string().default("celsius") }),
  enums: z.object({ color: z.enum(["red", "blue"]) }),
  literals: z.object({ answer: z.literal(["yes", "no"]), one: z.literal(1), sure: z.literal(true) }),
  steps: z.object({ steps: z.array(Step), final_answer: z.string() }),
  event: z.object({ name: z.string(), day: z.iso.date(), participants: z.array(z.string()) }),
  moment: z.object({ at: z.iso.datetime() }),
  time: z.object({ daily: z.iso.time() }),
  uuid: z.object({ id: z.uuid() }),
  email: z.object({ address: z.email() }),
  url: z.object({ link: z.url() }),
  ip: z.object({ address: z.ipv4() }),
  regex: z.object({ code: z.string().regex(/^[A-Z]{2}-\d{3}$/) }),
  lengths: z.object({ short: z.string().min(2).max(4) }),
  starts: z.object({ id: z.string().startsWith("id-"), end: z.string().endsWith(".") }),
  multiple: z.object({ minutes: z.number().int().multipleOf(5).min(0).max(60) }),
  positive: z.object({ price: z.number().positive(), discount: z.number().gte(0).lt(1) }),
  coordinates: z.object({ point: z.array(z.number()).length(2) }),
  bounded: z.object({ scores: z.array(z.number().int().min(0).max(10)).min(1).max(3) }),
  counts: z.object({ byWord: z.array(z.object({ word: z.string(), count: z.number().int() })) }),
  union: z.object({ value: z.union([z.string(), z.number(), z.array(z.number())]) }),
  tagged: z.object({ pet: z.discriminatedUnion("kind", [Cat, Dog]) }),
  tree: Tree,
  ui: Ui,
  linked: List,
  nested: z.object({ name: z.string(), home: Address, work: Address.nullable() }),
  matrix: z.object({ rows: z.array(z.array(z.number())) }),
  nothing: z.object({ nothing: z.null(), list: z.array(z.object({ a: z.boolean() })) }),
};

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
let failed = 0;
for (const [name, schema] of Object.entries(schemas)) {
  let problem = null;
  try {
    const reply = await client.chat.completions.parse({
      model,
      messages: [{ role: "user", content: name }],
      response_format: zodResponseFormat(schema, name),
    });
    if (reply.choices[0].message.parsed === null) problem = "not parsed";
  } catch (error) {
    problem = String(error.message);
  }
  failed += problem === null ? 0 : 1;
  console.log(JSON.stringify({ name, problem }));
}
process.exit(failed ? 1 : 0);
