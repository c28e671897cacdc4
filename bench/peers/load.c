/* The load client: drives any server of the bench over HTTP/1.1 on 127.0.0.1, with the same requests for all.
 *
 *     cc -O2 -o load load.c && ./load PORT CONTROL PATIENCE
 *
 * It reads one command per line and prints one JSON object per result. One thread, one epoll, no pipelining. CONTROL is the
 * port for change commands (servers/scene.py), or 0 to send them to /change and /touch. PATIENCE is how many milliseconds it
 * sleeps while nothing arrives. With 0 it never sleeps, because waking it would cost the server's core; in production,
 * another machine does that. "busy" is how long it was processing.
 *
 *     open N WHAT SECONDS       grow to N listen streams; WHAT is tools, prompts, or uris:K (K different URIs each)
 *     session N x SECONDS       grow to N legacy sessions, each with its GET stream
 *     change R COUNT SECONDS    R times: COUNT changes in one request, until every stream of tools got all notifications
 *     burst COUNT x SECONDS     COUNT changes in one request, until all streams got each, or nothing arrives any more
 *     touch R URI SECONDS       R times: change the content of URI, until one stream got the notification
 *     list K ERA SECONDS        K connections request tools/list for SECONDS, each again after its response
 *     gather K ERA SECONDS      K connections, one for each stream, each requests tools/list once
 *     herd x ERA SECONDS        after gather: one change; every stream then requests tools/list on its connection, until all
 *                               have the new list; streams that share a connection wait in a queue
 *
 * Streams stay open until standard input ends. Ids have seven digits, so that all servers write the same number of bytes.
 */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define FIRST_ID 1000000
#define WINDOW 64 /* opens in flight: many, but fewer than any backlog */
#define MOST 20000
#define QUIET 2.0 /* seconds without data after which no more is expected: a server may combine changes */
#define CARRY 64  /* bytes kept from the end of a read, to find a name that spans two reads */
#define TAIL 2048 /* bytes kept from the end of a response: the changing tool is the last of the list */

enum role { LISTEN, SESSION, ASKER, CONTROL };
enum phase { HEAD, LENGTH, SIZE, CHUNK, TRAILER, DONE };

struct conn {
    int fd, number, step; /* step: the progress of a legacy handshake */
    enum role role;
    enum phase phase;
    int is_open, is_waiting, is_again, status, has_ended;
    long left; /* bytes of the body or chunk that are still missing */
    int head_length, carried, tail_length;
    int told; /* notifications received */
    struct conn *asks, *asks_last; /* of an asker: the queue of streams that wait to request */
    struct conn *behind;           /* of a stream: the next in that queue */
    char watches, session[80], head[2048], carry[CARRY], *tail;
};

static struct conn *streams[MOST], *askers[MOST], *control;
static int stream_count, asker_count, port, control_port, poll_fd;
static int opened, told_goal, told_enough, answers, is_listing, is_herd, stale, held, again, watched_count;
static long notifications;
static double last_told, busy;
static int patience;
static int version = 1;
static char era_is_legacy, failure[300], marker[40];
static char buffer[1 << 18];

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static void fail(const char *format, ...) {
    va_list given;
    if (*failure) return; /* keep the first failure */
    va_start(given, format);
    vsnprintf(failure, sizeof failure, format, given);
    va_end(given);
    for (char *c = failure; *c; c++)
        if (*c == '"' || *c == '\\' || (unsigned char)*c < ' ') *c = ' ';
}

/* Requests */

#define META "\"_meta\":{\"io.modelcontextprotocol/protocolVersion\":\"2026-07-28\"," \
    "\"io.modelcontextprotocol/clientInfo\":{\"name\":\"load\",\"version\":\"1\"}," \
    "\"io.modelcontextprotocol/clientCapabilities\":{}}"
#define COMMON "Host: 127.0.0.1:%d\r\nAccept: application/json, text/event-stream\r\n"
#define MODERN COMMON "Content-Type: application/json\r\nMCP-Protocol-Version: 2026-07-28\r\nMcp-Method: "
#define LEGACY COMMON "Content-Type: application/json\r\nMCP-Protocol-Version: 2025-11-25\r\n"

static void reach(struct conn *c) {
    int where = c->role == CONTROL && control_port ? control_port : port;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(where), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = c};
    int one = 1;
    c->fd = socket(AF_INET, SOCK_STREAM, 0);
    if (c->fd < 0 || connect(c->fd, (void *)&address, sizeof address)) {
        fail("connection %d failed: %s", c->number, strerror(errno));
        return;
    }
    fcntl(c->fd, F_SETFL, O_NONBLOCK);
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    epoll_ctl(poll_fd, EPOLL_CTL_ADD, c->fd, &event);
}

static void put(struct conn *c, const char *text, int length) {
    if (c->fd < 0) reach(c); /* the server has closed an idle connection */
    c->phase = HEAD;
    c->head_length = c->tail_length = 0;
    c->is_waiting = 1;
    /* Requests are small and the socket is empty: one send takes all of it. */
    int sent = send(c->fd, text, length, MSG_NOSIGNAL);
    if (sent < 0 && c->role == ASKER && (errno == EPIPE || errno == ECONNRESET)) return; /* the next read finds it closed, and it reconnects */
    if (sent != length) fail("a request could not be sent: %s", strerror(errno));
}

static void post(struct conn *c, const char *head, const char *session, const char *body) {
    static char text[1 << 20];
    int length = snprintf(text, sizeof text, "%s%s%s%sContent-Length: %zu\r\n\r\n%s", head, *session ? "Mcp-Session-Id: " : "",
                          session, *session ? "\r\n" : "", strlen(body), body);
    put(c, text, length);
}

static void ask_modern(struct conn *c, const char *method, int id, const char *params) {
    static char head[600], body[1 << 19];
    snprintf(head, sizeof head, "POST /mcp HTTP/1.1\r\n" MODERN "%s\r\n", port, method);
    snprintf(body, sizeof body, "{\"jsonrpc\":\"2.0\",\"id\":%d,\"method\":\"%s\",\"params\":{%s" META "}}", id, method, params);
    post(c, head, "", body);
}

static void ask_legacy(struct conn *c, const char *body) {
    char head[600];
    snprintf(head, sizeof head, "POST /mcp HTTP/1.1\r\n" LEGACY, port);
    post(c, head, c->session, body);
}

static void ask_list(struct conn *c) {
    char body[120];
    if (!era_is_legacy) {
        ask_modern(c, "tools/list", FIRST_ID + c->number, "");
        return;
    }
    snprintf(body, sizeof body, "{\"jsonrpc\":\"2.0\",\"id\":%d,\"method\":\"tools/list\",\"params\":{}}", FIRST_ID + c->number);
    ask_legacy(c, body);
}

/* Request the list for a stream, on its connection, with the session of the stream. */
static void ask_for(struct conn *c, struct conn *stream) {
    memcpy(c->session, stream->session, sizeof c->session);
    ask_list(c);
}

static void want_list(struct conn *stream) {
    struct conn *c = askers[stream->number % asker_count];
    stream->behind = NULL;
    if (c->asks) c->asks_last->behind = stream;
    else c->asks = stream, ask_for(c, stream);
    c->asks_last = stream;
}

/* Do one step of a legacy handshake. The last one opens the stream, or leaves an asker ready. */
static void shake_hands(struct conn *c) {
    char text[700];
    if (c->step == 0)
        ask_legacy(c, "{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"initialize\",\"params\":{\"protocolVersion\":\"2025-11-25\","
                      "\"capabilities\":{},\"clientInfo\":{\"name\":\"load\",\"version\":\"1\"}}}");
    else if (c->step == 1)
        ask_legacy(c, "{\"jsonrpc\":\"2.0\",\"method\":\"notifications/initialized\"}");
    else if (c->role == SESSION)
        put(c, text, snprintf(text, sizeof text, "GET /mcp HTTP/1.1\r\n" COMMON "MCP-Protocol-Version: 2025-11-25\r\n"
                              "Mcp-Session-Id: %s\r\n\r\n", port, c->session));
    else {
        c->is_open = 1;
        opened++;
    }
    c->step++;
}

static void listen_on(struct conn *c, const char *what) {
    static char params[1 << 18];
    int uris = strncmp(what, "uris:", 5) ? 0 : atoi(what + 5), length;
    c->watches = what[0];
    length = snprintf(params, sizeof params, "\"notifications\":{");
    for (int i = 0; i < uris && length < (int)sizeof params - 200; i++)
        length += snprintf(params + length, sizeof params - length, "%s\"bench://item/%d\"%s", i ? "," : "\"resourceSubscriptions\":[",
                           c->number * uris + i, i == uris - 1 ? "]" : "");
    if (!uris) length += snprintf(params + length, sizeof params - length, "\"%sListChanged\":true", what);
    snprintf(params + length, sizeof params - length, "},");
    ask_modern(c, "subscriptions/listen", FIRST_ID + c->number, params);
}

static void ask_control(const char *what, const char *name, const char *which, int count) {
    char text[400];
    if (control_port) put(control, text, snprintf(text, sizeof text, "%s %s %d\n", what, which, count));
    else {
        snprintf(text, sizeof text, "POST /%s?%s=%s&count=%d HTTP/1.1\r\n" COMMON, what, name, which, count, port);
        post(control, text, "", "");
    }
}

static void ask_change(int count) {
    char which[20];
    snprintf(which, sizeof which, "%d", version);
    version += count;
    ask_control("change", "version", which, count);
}

/* Responses */

static void keep_tail(struct conn *c, const char *data, int length) {
    if (!c->tail) return;
    if (length >= TAIL) {
        memcpy(c->tail, data + length - TAIL, TAIL);
        c->tail_length = TAIL;
        return;
    }
    int kept = c->tail_length + length > TAIL ? TAIL - length : c->tail_length;
    memmove(c->tail, c->tail + c->tail_length - kept, kept);
    memcpy(c->tail + kept, data, length);
    c->tail_length = kept + length;
}

static void answered(struct conn *c) {
    c->is_waiting = c->is_again = 0;
    if (c->status >= 300 || c->status < 200) fail("an answer has the status %d", c->status);
    if (c->role == SESSION || (c->role == ASKER && !c->is_open)) {
        shake_hands(c);
    } else if (c->role == ASKER && c->asks) {
        if (is_herd && !memmem(c->tail, c->tail_length, marker, strlen(marker))) {
            stale++;
            ask_list(c);
            return;
        }
        held++;
        c->asks = c->asks->behind;
        if (c->asks) ask_for(c, c->asks);
    } else if (c->role == ASKER) {
        answers++;
        if (is_listing) ask_list(c);
    }
}

static void notified(struct conn *c, int number) {
    if (c->told < told_goal && c->told + number >= told_goal) told_enough++;
    c->told += number;
    notifications += number;
    last_told = now();
    if (is_herd && c->told == number) want_list(c); /* once */
}

/* Count the events of a stream by their method names. */
static void scan(struct conn *c, const char *data, int length) {
    static char both[sizeof buffer + CARRY];
    static const char *names[] = {"notifications/tools/list_changed", "notifications/resources/updated"};
    memcpy(both, c->carry, c->carried);
    memcpy(both + c->carried, data, length);
    int total = c->carried + length, used = 0, number = 0;
    if (c->role == LISTEN && !c->is_open) {
        char *found = memmem(both, total, "subscriptions/acknowledged", 26);
        if (found) {
            c->is_open = 1;
            opened++;
            used = found + 26 - both;
        } else if (memmem(both, total, "\"error\"", 7))
            fail("a stream was refused: %.*s", total < 200 ? total : 200, both);
    }
    const char *name = names[c->watches == 'u'];
    int size = strlen(name);
    for (char *found; (found = memmem(both + used, total - used, name, size)); number++) used = found + size - both;
    c->carried = total - used < size - 1 ? total - used : size - 1;
    memcpy(c->carry, both + total - c->carried, c->carried);
    if (number) notified(c, number);
}

/* Parse the head of a response. Return the start of the body, or NULL if the head is incomplete. */
static const char *read_head(struct conn *c, const char *data, int length) {
    int before = c->head_length, room = (int)sizeof c->head - 1 - before;
    memcpy(c->head + before, data, length < room ? length : room);
    c->head_length += length < room ? length : room;
    c->head[c->head_length] = 0;
    char *end = strstr(c->head, "\r\n\r\n"), *field;
    if (!end) {
        if (c->head_length == (int)sizeof c->head - 1) fail("the head of an answer is too long");
        return NULL;
    }
    end[2] = 0;
    c->status = atoi(c->head + 9);
    if ((field = strcasestr(c->head, "\r\nmcp-session-id:"))) sscanf(field + 17, " %79[^\r]", c->session);
    if (strcasestr(c->head, "\r\ntransfer-encoding: chunked")) c->phase = SIZE, c->left = 0, c->has_ended = 0;
    else {
        field = strcasestr(c->head, "\r\ncontent-length:");
        c->left = field ? atol(field + 17) : 0;
        c->phase = LENGTH;
    }
    return data + (end + 4 - c->head) - before;
}

/* Parse one response from the received bytes; true when it is complete. */
static int follow(struct conn *c, const char *data, int length) {
    const char *end = data + length;
    if (c->phase == HEAD && !(data = read_head(c, data, length))) return 0;
    while (c->phase != DONE) {
        if (c->phase == LENGTH || c->phase == CHUNK) {
            long taken = end - data < c->left ? end - data : c->left;
            keep_tail(c, data, taken);
            data += taken;
            c->left -= taken;
            if (c->left) return 0;
            if (c->phase == LENGTH) c->phase = DONE;
            else c->phase = TRAILER;
        } else if (data == end) return 0;
        else if (c->phase == TRAILER) { /* the line end after a chunk */
            if (*data++ == '\n') c->phase = c->has_ended ? DONE : SIZE;
        } else {
            char digit = *data++ | 32;
            if (digit >= '0' && digit <= '9') c->left = c->left * 16 + digit - '0';
            else if (digit >= 'a' && digit <= 'f') c->left = c->left * 16 + digit - 'a' + 10;
            else if (digit == ('\n' | 32)) c->has_ended = !c->left, c->phase = c->left ? CHUNK : TRAILER;
        }
    }
    return 1;
}

static void take(struct conn *c) {
    int length = recv(c->fd, buffer, sizeof buffer, 0);
    if (length < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (length <= 0) {
        close(c->fd);
        c->fd = -1;
        if (c->role == ASKER && c->is_open && c->is_waiting && !c->head_length && !c->is_again) {
            /* The server closed the idle connection during the request: reconnect and repeat, as any HTTP client. */
            c->is_again = 1;
            again++;
            ask_list(c);
        } else if (c->is_waiting || c->role == LISTEN || c->role == SESSION)
            fail("the server closed a connection (%s %d)", c->role == ASKER ? "asker" : "stream", c->number);
        return;
    }
    if (c->role == CONTROL && control_port) {
        if (*buffer != '\n') fail("a change failed: %.*s", length < 200 ? length : 200, buffer);
        c->is_waiting = 0;
        return;
    }
    int is_stream = c->role == LISTEN || (c->role == SESSION && c->step == 3);
    if (!is_stream) {
        if (follow(c, buffer, length)) answered(c);
        return;
    }
    const char *data = buffer;
    if (c->phase == HEAD) {
        if (!(data = read_head(c, buffer, length))) return;
        if (c->status != 200) fail("a stream was refused with the status %d: %.150s", c->status, data);
        if (c->role == SESSION) c->is_open = 1, opened++;
    }
    scan(c, data, buffer + length - data);
}

/* Waiting */

static int is_done(int *count, int goal) { return *failure || *count >= goal; }

static void pump(void) {
    struct epoll_event events[512];
    double start = now();
    int number = epoll_wait(poll_fd, events, 512, patience);
    if (number <= 0) return;
    if (patience) start = now();
    for (int i = 0; i < number; i++) take(events[i].data.ptr);
    busy += now() - start;
}

static void wait_for(int *count, int goal, double deadline, const char *what) {
    while (!is_done(count, goal)) {
        if (now() > deadline) fail("timed out: %d of %d %s", *count, goal, what);
        pump();
    }
}

static void wait_for_control(double deadline) {
    while (control->is_waiting && !*failure) {
        if (now() > deadline) fail("timed out: a change was not answered");
        pump();
    }
}

static struct conn *dial(enum role role, int number) {
    struct conn *c = calloc(1, sizeof *c);
    c->role = role;
    c->number = number;
    reach(c);
    return c;
}

/* Commands */

static void open_streams(int goal, const char *what, double deadline, int is_session) {
    opened = stream_count;
    if (goal > MOST) fail("%d streams are more than %d", goal, MOST);
    while (opened < goal && !*failure) {
        while (stream_count < goal && stream_count < opened + WINDOW && !*failure) {
            struct conn *c = streams[stream_count] = dial(is_session ? SESSION : LISTEN, stream_count);
            if (*failure) break;
            if (is_session) c->watches = 't', shake_hands(c);
            else listen_on(c, what);
            watched_count += c->watches == 't';
            stream_count++;
        }
        if (now() > deadline) fail("timed out: %d of %d streams opened", opened, goal);
        pump();
    }
}

static void goal_of(int more) {
    told_enough = 0;
    for (int i = 0; i < stream_count; i++) streams[i]->told = 0;
    told_goal = more;
}

static void change(int rounds, int count, double deadline) {
    for (int i = 0; i < rounds && !*failure; i++) {
        goal_of(count);
        double start = now();
        ask_change(count);
        wait_for(&told_enough, watched_count, deadline, "streams told");
        printf("%s%.6f", i ? "," : "", last_told - start);
        wait_for_control(deadline);
    }
}

static void touch(int rounds, const char *uri, double deadline) {
    for (int i = 0; i < rounds && !*failure; i++) {
        goal_of(1);
        double start = now();
        ask_control("touch", "uri", uri, 1);
        wait_for(&told_enough, 1, deadline, "streams told");
        printf("%s%.6f", i ? "," : "", last_told - start);
        wait_for_control(deadline);
    }
}

static void burst(int count, double deadline) {
    double start = now();
    goal_of(count);
    last_told = start;
    ask_change(count);
    while (!*failure && told_enough < watched_count && (control->is_waiting || now() < last_told + QUIET)) {
        if (now() > deadline) fail("timed out: after %ld notifications of a burst", notifications);
        pump();
    }
    wait_for_control(deadline);
    printf("%.6f", last_told - start);
}

static void add_askers(int goal, int is_greeting, double deadline) {
    opened = 0;
    for (int first = asker_count; asker_count < goal && !*failure; asker_count++) {
        struct conn *c = askers[asker_count] = dial(ASKER, asker_count);
        c->tail = malloc(TAIL);
        if (is_greeting) {
            shake_hands(c);
            wait_for(&opened, asker_count - first + 1, deadline, "sessions ready");
        } else c->is_open = 1;
    }
}

static void list(int connections, double seconds) {
    add_askers(connections, era_is_legacy, now() + 60);
    double start = now();
    answers = 0;
    is_listing = 1;
    for (int i = 0; i < connections; i++) ask_list(askers[i]);
    while (now() < start + seconds && !*failure) pump();
    is_listing = 0;
    for (int i = 0; i < connections; i++) { /* wait for the responses that are still open; they count */
        while (askers[i]->is_waiting && !*failure && now() < start + seconds + 60) pump();
        if (askers[i]->is_waiting) fail("timed out: a list was not answered for a minute");
    }
    printf("%.6f],\"answers\":%d,\"rest\":[", now() - start, answers);
}

/* Connect before the change, so that no server has to accept connections while time is measured. */
static void gather(int connections, double deadline) {
    add_askers(connections, 0, deadline);
    held = 0;
    for (int i = 0; i < stream_count; i++) want_list(streams[i]);
    wait_for(&held, stream_count, deadline, "clients hold a list");
}

static void herd(double deadline) {
    if (!asker_count) fail("run gather first");
    goal_of(1);
    held = stale = again = 0;
    is_herd = 1;
    snprintf(marker, sizeof marker, "Version %06d", version);
    double start = now();
    ask_change(1);
    wait_for(&held, watched_count, deadline, "clients hold the new list");
    double taken = now() - start;
    is_herd = 0;
    wait_for_control(deadline);
    printf("%.6f],\"told\":%.6f,\"stale\":%d,\"again\":%d,\"rest\":[", taken, last_told - start, stale, again);
}

int main(int argc, char **argv) {
    char line[200], name[20], text[100];
    double seconds;
    if (argc != 4) return fprintf(stderr, "load PORT CONTROL PATIENCE, and commands on standard input\n"), 2;
    port = atoi(argv[1]);
    poll_fd = epoll_create1(0);
    control_port = atoi(argv[2]);
    patience = atoi(argv[3]);
    control = dial(CONTROL, 0);
    while (fgets(line, sizeof line, stdin)) {
        char first[20];
        if (sscanf(line, "%19s %19s %99s %lf", name, first, text, &seconds) != 4) return fprintf(stderr, "can't read %s", line), 2;
        int number = atoi(first);
        double deadline = now() + seconds;
        notifications = 0;
        busy = 0;
        era_is_legacy = !strcmp(text, "legacy");
        double begin = now();
        printf("{\"times\":[");
        if (!strcmp(name, "open") || !strcmp(name, "session")) {
            open_streams(number, text, deadline, *name == 's');
            printf("%.6f", now() - begin);
        } else if (!strcmp(name, "change")) change(number, atoi(text), deadline);
        else if (!strcmp(name, "touch")) touch(number, text, deadline);
        else if (!strcmp(name, "burst")) burst(number, deadline);
        else if (!strcmp(name, "list")) list(number, seconds);
        else if (!strcmp(name, "gather")) {
            gather(number, deadline);
            printf("%.6f", now() - begin);
        } else if (!strcmp(name, "herd")) herd(deadline);
        else fail("there is no command %s", name);
        printf("],\"streams\":%d,\"notifications\":%ld,\"busy\":%.6f,\"error\":\"%s\"}\n", stream_count, notifications, busy, failure);
        fflush(stdout);
        if (*failure) return 1;
    }
    return 0;
}
