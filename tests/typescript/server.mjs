// A server of the TypeScript SDK, of both eras, whose lists and notifications tests/support/mirrored_servers.py controls.
//
//     node server.mjs PORT LISTS
//
// LISTS is JSON: the description of each item, by list and key. `POST /lists` replaces it, `POST /notify/FEATURE` notifies
// of a list, and `POST /drop` closes all other connections. Pages have three items. Each listed tool can be called.

import { randomUUID } from 'node:crypto';
import { createServer } from 'node:http';

import { NodeStreamableHTTPServerTransport, toNodeHandler } from '@modelcontextprotocol/node';
import { createMcpHandler, Server } from '@modelcontextprotocol/server';

const PAGE = 3;
const FORMS = {
  'tools/list': ['tools', 'tools', 'name'],
  'prompts/list': ['prompts', 'prompts', 'name'],
  'resources/list': ['resources', 'resources', 'uri'],
  'resources/templates/list': ['templates', 'resourceTemplates', 'uriTemplate'],
};
const SENDERS = { tools: 'sendToolListChanged', prompts: 'sendPromptListChanged', resources: 'sendResourceListChanged' };
const sessions = new Map();
const sockets = new Set();
let lists = JSON.parse(process.argv[3]);

function build() {
  const listChanged = true;
  const capabilities = { tools: { listChanged }, prompts: { listChanged }, resources: { listChanged } };
  const server = new Server({ name: 'typescript', version: '1' }, { capabilities });
  for (const [method, [list, member, key]] of Object.entries(FORMS)) {
    server.setRequestHandler(method, async request => {
      const start = Number(request.params?.cursor ?? 0);
      const items = Object.entries(lists[list]).map(([name, description]) => ({
        name,
        [key]: name,
        description,
        ...(list === 'tools' && { inputSchema: { type: 'object' } }),
      }));
      const next = start + PAGE < items.length ? { nextCursor: String(start + PAGE) } : {};
      return { [member]: items.slice(start, start + PAGE), ...next };
    });
  }
  server.setRequestHandler('tools/call', async ({ params }) => {
    const isKnown = params.name in lists.tools;
    return { content: [{ type: 'text', text: isKnown ? 'called' : `Unknown tool: ${params.name}` }], isError: !isKnown };
  });
  return server;
}

async function serveSession(request, response) {
  const id = request.headers['mcp-session-id'];
  if (id && !sessions.has(id)) return response.writeHead(404).end();
  if (id) return sessions.get(id).transport.handleRequest(request, response);
  const server = build();
  const transport = new NodeStreamableHTTPServerTransport({
    sessionIdGenerator: randomUUID,
    onsessioninitialized: made => sessions.set(made, { transport, server }),
  });
  await server.connect(transport);
  return transport.handleRequest(request, response);
}

async function control(request, [what, feature]) {
  let text = '';
  for await (const chunk of request) text += chunk;
  if (what === 'lists') lists = JSON.parse(text);
  if (what === 'drop') for (const socket of sockets) if (socket !== request.socket) socket.destroy();
  if (what === 'notify') {
    handler.notify[`${feature}Changed`]();
    for (const { server } of sessions.values()) await server[SENDERS[feature]]().catch(() => {});
  }
}

const handler = createMcpHandler(build, { legacy: 'reject' });
const serveModern = toNodeHandler(handler);
const http = createServer(async (request, response) => {
  const path = request.url.split('/').slice(1);
  if (path[0] !== 'mcp') {
    await control(request, path);
    response.end();
  } else if (request.headers['mcp-protocol-version'] === '2026-07-28') await serveModern(request, response);
  else await serveSession(request, response);
});
http.on('connection', socket => {
  sockets.add(socket);
  socket.on('close', () => sockets.delete(socket));
});
http.listen(Number(process.argv[2]), '127.0.0.1', () => console.log(http.address().port));
