// The API as the server describes it in /openapi.json: routes, fields, replies, and a command for each.

import { h } from "./dom.js";

const main = document.getElementById("main");

fetch("/openapi.json")
  .then((reply) => reply.json())
  .then(show)
  .catch(() => main.replaceChildren(h("p", { class: "notice bad" }, "The server cannot be reached. Is it still running?")));

function show(api) {
  const named = (schema) => (schema?.$ref ? api.components.schemas[schema.$ref.split("/").at(-1)] : schema);
  const routes = Object.entries(api.paths).flatMap(([path, methods]) => Object.entries(methods).map(([method, about]) => ({ path, method, about })));
  main.replaceChildren(
    h("h2", {}, `${api.info.title} ${api.info.version}: the API`),
    h("p", { class: "intro" }, `${api.info.description} Errors are {"error": "one line"} with a status of 4xx or 503. ${api.components.securitySchemes ? "This server needs a token: Authorization: Bearer …" : ""}`),
    ...routes.map((route) => routePart(route, named)));
}

function routePart({ path, method, about }, named) {
  const content = about.requestBody?.content;
  const body = named(content?.["application/json"]?.schema);
  const reply = named(about.responses["200"]?.content?.["application/json"]?.schema);
  return h("details", { class: "card route" },
    h("summary", {}, h("span", { class: `method ${method}` }, method.toUpperCase()), h("h3", {}, path), h("span", { class: "hint" }, about.description || "")),
    about.parameters && [h("h4", {}, "Parameters"), fields(about.parameters.map((one) => [one.name, one.schema, one.required, one.description]))],
    body && [h("h4", {}, "Body (JSON)"), properties(body, named)],
    content?.["application/octet-stream"] && h("h4", {}, "Body: the file itself (application/octet-stream)"),
    h("h4", {}, "For example"), h("pre", { tabindex: "0" }, command(path, method, body, named, content)),
    reply && [h("h4", {}, "Reply"), properties(reply, named)]);
}

const properties = (schema, named) => fields(Object.entries(schema.properties || {}).map(([name, one]) => [name, one, schema.required?.includes(name), one.description]), named);

function fields(rows) {
  return h("div", { class: "data" }, h("table", {}, h("thead", {}, h("tr", {}, ["name", "type", ""].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, rows.map(([name, schema, isNeeded, text]) => h("tr", {}, h("td", {}, name), h("td", { class: "kind" }, kind(schema)), h("td", {}, [text, isNeeded ? "" : "Optional."].filter(Boolean).join(" ")))))));
}

function kind(schema) {
  if (schema.$ref) return schema.$ref.split("/").at(-1);
  if (schema.anyOf) return schema.anyOf.map(kind).join(" or ");
  if (schema.enum || schema.const) return (schema.enum || [schema.const]).map((value) => `"${value}"`).join(" or ");
  if (schema.type === "array") return `list of ${kind(schema.items || {})}`;
  return schema.type || "any";
}

const EXAMPLES = { src_addr: "192.0.2.1", dst_addr: "192.0.2.71", dst_addrs: ["192.0.2.71", "192.0.2.81"], prefix: "193.0.", rtt: 20 };

function example(schema, named) {
  const whole = named(schema);
  return Object.fromEntries((whole.required || []).map((name) => {
    const inner = named(whole.properties[name].items || whole.properties[name]);
    const value = name in EXAMPLES ? EXAMPLES[name] : inner?.properties ? example(inner, named) : null;
    return [name, whole.properties[name].type === "array" && !Array.isArray(value) ? [value] : value];
  }));
}

function command(path, method, body, named, content) {
  if (content?.["application/octet-stream"]) return `curl --data-binary @my_pings.csv -H 'Content-Type: application/octet-stream' ${location.origin}${path}`;
  if (method === "get") return `curl '${location.origin}${path}${path.endsWith("history") ? "?src_addr=192.0.2.1" : ""}'`;
  return `curl -H 'Content-Type: application/json' ${location.origin}${path} \\\n  -d '${JSON.stringify(example(body, named))}'`;
}
