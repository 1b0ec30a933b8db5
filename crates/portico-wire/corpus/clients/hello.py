"""python3 hello.py PORT NAME [pyopenssl]: one TLS connection to a loopback port, asking for the name.

The third argument takes the OpenSSL that comes with pyOpenSSL instead of the system's, which may be years
newer.
"""

import socket
import sys

port, name = int(sys.argv[1]), sys.argv[2]
plain = socket.create_connection(("127.0.0.1", port))
if sys.argv[3:] == ["pyopenssl"]:
    from OpenSSL import SSL

    context = SSL.Context(SSL.TLS_CLIENT_METHOD)
    context.set_alpn_protos([b"h2", b"http/1.1"])
    connection = SSL.Connection(context, plain)
    connection.set_tlsext_host_name(name.encode())
    connection.set_connect_state()
    connection.do_handshake()
else:
    import ssl

    context = ssl.create_default_context()
    context.wrap_socket(plain, server_hostname=name)
