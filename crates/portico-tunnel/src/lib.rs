//! HTTP/2 and HTTP/1.1 CONNECT: the server half, its TLS and its identities.
