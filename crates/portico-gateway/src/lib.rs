//! The data plane: listen, read the hello, choose the route, connect, copy, drain.
