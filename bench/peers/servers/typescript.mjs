// Serves the TypeScript SDK as its documentation shows: one handler for listen streams and stateless requests, with a factory
// that makes a server for each request. Legacy sessions, which that handler does not keep, have a transport each.

import { randomUUID } from 'node:crypto';
import { createServer } from 'node:http';
import { createServer as createListener } from 'node:net';
import { createRequire } from 'node:module';

const require = createRequire(new URL('../../../tests/typescript/package.json', import.meta.url));
const { McpServer, createMcpHandler } = require('@modelcontextprotocol/server');
const { serveStdio } = require('@modelcontextprotocol/server/stdio');
const { NodeStreamableHTTPServerTransport, toNodeHandler } = require('@modelcontextprotocol/node');
const z = require('zod/v4');

const [transport, , tools = '10'] = process.argv.slice(2);
const DESCRIPTION = 'Finds the tickets of one sprint that mention a text, newest first.';
const inputSchema = z.object({ sprint: z.number().int(), text: z.string().default(''), limit: z.number().int().default(20) });
const outputSchema = z.object({ result: z.string() });
const touchSchema = z.object({ count: z.number().int() });
const sessions = new Map();
let described = describe(0);

function describe(version) {
    return `Version ${String(version).padStart(6, '0')} of a tool that changes.`;
}

function findTickets({ sprint, text }) {
    const result = `nothing in sprint ${sprint} mentions ${text}`;
    return { content: [{ type: 'text', text: result }], structuredContent: { result } };
}

function build() {
    const server = new McpServer({ name: 'bench', version: '' }, { capabilities: { tools: { listChanged: true }, resources: { subscribe: true } } });
    server.registerTool('touch', { inputSchema: touchSchema }, async ({ count }) => {
        for (let number = 0; number < count; number++) await server.server.sendResourceUpdated({ uri: `bench://item/${number}` });
        return { content: [{ type: 'text', text: 'done' }] };
    });
    for (let number = 0; number < Number(tools) - 2; number++)
        server.registerTool(`tool_${number}`, { description: DESCRIPTION, inputSchema, outputSchema }, findTickets);
    const changing = server.registerTool('zz_changing', { description: described, inputSchema, outputSchema }, findTickets);
    server.changing = changing;
    return server;
}

async function serveSession(request, response) {
    const known = sessions.get(request.headers['mcp-session-id']);
    if (known) return known.transport.handleRequest(request, response);
    const transport = new NodeStreamableHTTPServerTransport({
        sessionIdGenerator: randomUUID,
        onsessioninitialized: (id) => sessions.set(id, { transport, server }),
    });
    const server = build();
    await server.connect(transport);
    return transport.handleRequest(request, response);
}

// Runs the commands of scene.py.
async function follow(handler, what, which, count) {
    for (let turn = 0; turn < Number(count); turn++) {
        if (what === 'touch') {
            handler.notify.resourceUpdated(which);
            continue;
        }
        described = describe(Number(which) + turn);
        handler.notify.toolsChanged();
        for (const { server } of sessions.values()) server.changing.update({ description: described });
        await new Promise((resolve) => setImmediate(resolve));
    }
}

if (transport === 'stdio') {
    serveStdio(build);
} else {
    const handler = createMcpHandler(build, { legacy: 'reject', maxSubscriptions: 50000 });
    const serveModern = toNodeHandler(handler);
    const http = createServer(async (request, response) => {
        const url = new URL(request.url, 'http://127.0.0.1');
        const what = url.pathname.slice(1);
        if (what === 'change' || what === 'touch') {
            await follow(handler, what, url.searchParams.get(what === 'change' ? 'version' : 'uri'), url.searchParams.get('count') ?? 1);
            response.end('{}');
        } else if (what === 'control') {
            const listener = createListener((socket) => {
                socket.setNoDelay();
                socket.on('data', async (line) => {
                    const failure = await follow(handler, ...line.toString().trim().split(' ')).catch(String);
                    socket.write(`${failure ?? ''}\n`);
                });
            });
            listener.listen({ port: 0, host: '127.0.0.1' }, () => response.end(String(listener.address().port)));
        } else if (request.headers['mcp-protocol-version'] === '2026-07-28') {
            await serveModern(request, response);
        } else {
            await serveSession(request, response);
        }
    });
    http.keepAliveTimeout = 120000; // as all servers of the bench: see PATIENT in scene.py
    http.listen({ port: 0, host: '127.0.0.1', backlog: 4096 }, () => console.log(http.address().port));
}
