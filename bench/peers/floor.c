/* The floor, the least that any server has to do: a loop of send() over the open streams, and ready responses.
 *
 *     cc -O2 -o floor floor.c && ./floor FOLDER
 *
 * FOLDER has bytes of Tidings that the bench recorded: `open` (the head of a stream and its acknowledgement), `told` (a
 * notification), `list` (the response to tools/list). Only ids and the version of the changing tool are written into
 * them. It handles the requests of load.c and no others. The first line of standard output is the port.
 */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#define RECORDED "1000000" /* the id of the recorded requests; all ids have this length */
#define DIGITS 7
#define MOST 20000

struct template {
    char *bytes;
    int length, id; /* the position of the id */
};

struct request {
    int fd, length;
    char bytes[4096]; /* a request is smaller, and arrives whole or in a few pieces */
};

struct stream {
    int fd;
    char id[DIGITS];
};

static struct template opening, told, list;
static char *list_version;
static struct stream streams[MOST];
static int stream_count;

static struct template load(const char *folder, const char *name) {
    char path[4096];
    struct template found = {0};
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "rb");
    if (!file) perror(path), exit(1);
    found.bytes = malloc(1 << 24);
    found.length = fread(found.bytes, 1, (1 << 24) - 1, file);
    fclose(file);
    char *id = memmem(found.bytes, found.length, RECORDED, DIGITS);
    if (!id) fprintf(stderr, "%s has no id\n", path), exit(1);
    found.id = id - found.bytes;
    return found;
}

static void put(int fd, const struct template *what, const char *id) {
    memcpy(what->bytes + what->id, id, DIGITS);
    for (int sent = 0; sent < what->length;) {
        int taken = send(fd, what->bytes + sent, what->length - sent, MSG_NOSIGNAL);
        if (taken < 0 && errno != EINTR) return; /* the client has disconnected */
        if (taken > 0) sent += taken;
    }
}

static void answer(struct request *r, int poll_fd) {
    static const char ok[] = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-type: application/json\r\n\r\n{}";
    char *id = strstr(r->bytes, "\"id\":");
    if (!strncmp(r->bytes, "POST /change?version=", 21)) {
        int version = atoi(r->bytes + 21), count = 1;
        char *more = strstr(r->bytes, "&count="), text[12];
        if (more) count = atoi(more + 7);
        for (; count > 0; count--) {
            snprintf(text, sizeof text, "%06d", version++ % 1000000);
            if (list_version) memcpy(list_version, text, 6);
            for (int i = 0; i < stream_count; i++) put(streams[i].fd, &told, streams[i].id);
        }
        send(r->fd, ok, sizeof ok - 1, MSG_NOSIGNAL);
    } else if (id && strstr(r->bytes, "\"subscriptions/listen\"")) {
        put(r->fd, &opening, id + 5);
        if (strstr(r->bytes, "\"toolsListChanged\"")) { /* other streams get no notifications */
            struct stream *s = &streams[stream_count++];
            s->fd = r->fd;
            memcpy(s->id, id + 5, DIGITS);
        }
        epoll_ctl(poll_fd, EPOLL_CTL_DEL, r->fd, NULL);
        free(r);
        return;
    } else if (id)
        put(r->fd, &list, id + 5);
    r->length = 0;
}

static void take(struct request *r, int poll_fd) {
    int taken = recv(r->fd, r->bytes + r->length, sizeof r->bytes - 1 - r->length, 0);
    if (taken <= 0) {
        close(r->fd);
        free(r);
        return;
    }
    r->length += taken;
    r->bytes[r->length] = 0;
    char *body = strstr(r->bytes, "\r\n\r\n"), *size = strstr(r->bytes, "Content-Length: ");
    if (body && size && r->bytes + r->length >= body + 4 + atoi(size + 16)) answer(r, poll_fd);
}

int main(int argc, char **argv) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    struct epoll_event events[512], event = {.events = EPOLLIN};
    int listener = socket(AF_INET, SOCK_STREAM, 0), poll_fd = epoll_create1(0), one = 1;
    if (argc != 2) return fprintf(stderr, "floor FOLDER\n"), 2;
    opening = load(argv[1], "open");
    told = load(argv[1], "told");
    list = load(argv[1], "list");
    list_version = memmem(list.bytes, list.length, "Version ", 8);
    if (list_version) list_version += 8;
    if (bind(listener, (void *)&address, sizeof address) || listen(listener, 4096)) return perror("floor"), 1;
    getsockname(listener, (void *)&address, &size);
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    epoll_ctl(poll_fd, EPOLL_CTL_ADD, listener, &event);
    for (;;) {
        int number = epoll_wait(poll_fd, events, 512, -1);
        for (int i = 0; i < number; i++) {
            if (events[i].data.ptr) {
                take(events[i].data.ptr, poll_fd);
                continue;
            }
            struct request *r = calloc(1, sizeof *r);
            r->fd = accept(listener, NULL, NULL);
            if (r->fd < 0) return perror("floor: accept"), 1;
            setsockopt(r->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
            event.data.ptr = r;
            epoll_ctl(poll_fd, EPOLL_CTL_ADD, r->fd, &event);
            event.data.ptr = NULL;
        }
    }
}
