//! The PROXY v2 header that an endpoint gets before the bytes of its client, if its Service asks for one.

use std::fmt::Display;
use std::net::SocketAddr;

use portico_wire::proxy;

/// A header with the real client, the name it asked for and the id its connection has in access lines.
pub(crate) fn proxy_header(
    client: SocketAddr,
    local: SocketAddr,
    name: Option<&str>,
    id: impl Display,
) -> Vec<u8> {
    let unique_id = id.to_string();
    let tlvs =
        proxy::Tlvs { authority: name, unique_id: Some(unique_id.as_bytes()), ..proxy::Tlvs::default() };
    proxy::encode_v2(client, local, tlvs)
}
