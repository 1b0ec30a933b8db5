//! Keeps this node from answering ARP for the address.
//!
//! By default Linux answers ARP on every wire for every address it has anywhere. Every node of a user cluster has this one, so each would
//! answer for it: a real owner elsewhere would lose its traffic, and the probe of the next agent to start would be answered by its
//! peers. `arp_ignore` would change what the node answers for other addresses, and a container may rarely write it. So: one nftables rule
//! that drops ARP requests for this address and nothing else (replies must pass: the node may ask from that address).
//!
//! The table lives as long as the address does: it is put up before and taken down after it, and stays where a crash leaves the address.
//! That is why it has no owner (`NFT_TABLE_F_OWNER`): it would go with the process, while the address stays. Who flushes all tables flushes
//! this one, too; the kernel tells, and it is put back.
//!
//! Spoken directly to the kernel (nfnetlink): there is no `nft` in our image.

use std::io;
use std::net::Ipv4Addr;

use super::netlink::{Message, NETFILTER, Request, Watch};

/// Attributes of linux/netfilter/nf_tables.h. A table's name; a chain's and a rule's table.
const TABLE: u16 = 1;
const CHAIN_NAME: u16 = 3;
const CHAIN_HOOK: u16 = 4;
const CHAIN_TYPE: u16 = 7;
const HOOK_NUMBER: u16 = 1;
const HOOK_PRIORITY: u16 = 2;
const RULE_CHAIN: u16 = 2;
const RULE_EXPRESSIONS: u16 = 4;
const ELEMENT: u16 = 1;
const EXPRESSION_NAME: u16 = 1;
const EXPRESSION_DATA: u16 = 2;
const PAYLOAD_REGISTER: u16 = 1;
const PAYLOAD_BASE: u16 = 2;
const PAYLOAD_OFFSET: u16 = 3;
const PAYLOAD_LENGTH: u16 = 4;
const COMPARE_REGISTER: u16 = 1;
const COMPARE_OPERATION: u16 = 2;
const COMPARE_DATA: u16 = 3;
const IMMEDIATE_REGISTER: u16 = 1;
const IMMEDIATE_DATA: u16 = 2;
const DATA_VALUE: u16 = 1;
const DATA_VERDICT: u16 = 2;
const VERDICT_CODE: u16 = 1;

/// Where in an ARP packet the operation and, for IPv4 on Ethernet, the address asked for are.
const OPERATION: u32 = 6;
const TARGET: u32 = 24;
/// An ARP request.
const ARP_REQUEST: u16 = 1;
/// The hook that ARP packets pass when they come in (`NF_ARP_IN`), and the priority that nft calls "filter".
const HOOK_IN: u32 = 0;
const PRIORITY: i32 = 0;

/// Bits of `nlmsg_flags`.
const ASK: u16 = 0x1;
const ACK: u16 = 0x4;
const DUMP: u16 = 0x300;
const CREATE: u16 = 0x400;
const APPEND: u16 = 0x800;

/// The group of notifications about nftables (`NFNLGRP_NFTABLES`, the seventh).
const CHANGES: u32 = 1 << 6;

/// A rule that drops ARP requests for an address, in a table of its own.
#[derive(Debug, Clone)]
pub(super) struct Guard {
    /// Named after the interface: agents of several user clusters on one host do not touch each other's.
    table: Box<str>,
    address: Ipv4Addr,
}

impl Guard {
    pub(super) fn new(interface: &str, address: Ipv4Addr) -> Self {
        Self { table: format!("portico-agent-{interface}").into(), address }
    }

    /// Has the kernel go through what [`put`](Self::put) would have it do, without doing it.
    pub(super) fn try_out(&self) -> io::Result<()> {
        // A batch without its end is checked and then dropped, as `nft --check` does.
        Request::open(NETFILTER)?.batch(self.messages())
    }

    /// Puts the rule up, in place of one that is there, in one step.
    pub(super) fn put(&self) -> io::Result<()> {
        let mut messages = self.messages();
        messages.push(frame(libc::NFNL_MSG_BATCH_END));
        Request::open(NETFILTER)?.batch(messages)
    }

    /// Takes the rule down. That there is none is fine.
    pub(super) fn remove(&self) -> io::Result<()> {
        let delete = message(libc::NFT_MSG_DELTABLE, ASK | ACK).text(TABLE, &self.table);
        let messages = vec![frame(libc::NFNL_MSG_BATCH_BEGIN), delete, frame(libc::NFNL_MSG_BATCH_END)];
        match Request::open(NETFILTER)?.batch(messages) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            result => result,
        }
    }

    /// Whether the rule is there.
    pub(super) fn stands(&self) -> io::Result<bool> {
        let mut rules = 0;
        let list =
            message(libc::NFT_MSG_GETRULE, ASK | DUMP).text(TABLE, &self.table).text(RULE_CHAIN, CHAIN);
        Request::open(NETFILTER)?.ask(list, |_, _| rules += 1)?;
        Ok(rules > 0)
    }

    /// Begins a batch that makes the table and the chain, empties the chain if it was there, and adds the rule.
    fn messages(&self) -> Vec<Message> {
        let table = message(libc::NFT_MSG_NEWTABLE, ASK | ACK | CREATE).text(TABLE, &self.table);
        let chain = message(libc::NFT_MSG_NEWCHAIN, ASK | ACK | CREATE)
            .text(TABLE, &self.table)
            .text(CHAIN_NAME, CHAIN)
            .nest(CHAIN_HOOK, |hook| {
                hook.with(HOOK_NUMBER, &HOOK_IN.to_be_bytes()).with(HOOK_PRIORITY, &PRIORITY.to_be_bytes())
            })
            .text(CHAIN_TYPE, "filter");
        let empty =
            message(libc::NFT_MSG_DELRULE, ASK | ACK).text(TABLE, &self.table).text(RULE_CHAIN, CHAIN);
        let rule = message(libc::NFT_MSG_NEWRULE, ASK | ACK | CREATE | APPEND)
            .text(TABLE, &self.table)
            .text(RULE_CHAIN, CHAIN)
            .nest(RULE_EXPRESSIONS, |rule| {
                let rule = where_equal(rule, OPERATION, &ARP_REQUEST.to_be_bytes());
                drop_packet(where_equal(rule, TARGET, &self.address.octets()))
            });
        vec![frame(libc::NFNL_MSG_BATCH_BEGIN), table, chain, empty, rule]
    }
}

/// The chain's name.
const CHAIN: &str = "input";

/// A socket that is told of changes of nftables.
pub(super) fn watch() -> io::Result<Watch> {
    Watch::open(NETFILTER, CHANGES)
}

/// Whether a notification is about something of ARP, where nobody else has much to do. It begins with the family.
pub(super) fn matters(_kind: u16, body: &[u8]) -> bool {
    body.first().is_some_and(|&family| i32::from(family) == libc::NFPROTO_ARP)
}

fn message(kind: libc::c_int, flags: u16) -> Message {
    // The numbers of the subsystem and of its messages are a byte each.
    let kind = (libc::NFNL_SUBSYS_NFTABLES << 8) as u16 | kind as u16;
    Message::new(kind, flags, &[libc::NFPROTO_ARP as u8, libc::NFNETLINK_V0 as u8, 0, 0])
}

/// The begin or the end of a batch.
fn frame(kind: libc::c_int) -> Message {
    let [high, low] = (libc::NFNL_SUBSYS_NFTABLES as u16).to_be_bytes();
    Message::new(kind as u16, ASK, &[0, libc::NFNETLINK_V0 as u8, high, low])
}

/// Goes on with the rule where the packet has `value` at `offset`.
fn where_equal(rule: Message, offset: u32, value: &[u8]) -> Message {
    let length = value.len() as u32;
    let rule = expression(rule, "payload", |data| {
        data.with(PAYLOAD_REGISTER, &(libc::NFT_REG_1 as u32).to_be_bytes())
            .with(PAYLOAD_BASE, &(libc::NFT_PAYLOAD_NETWORK_HEADER as u32).to_be_bytes())
            .with(PAYLOAD_OFFSET, &offset.to_be_bytes())
            .with(PAYLOAD_LENGTH, &length.to_be_bytes())
    });
    expression(rule, "cmp", |data| {
        data.with(COMPARE_REGISTER, &(libc::NFT_REG_1 as u32).to_be_bytes())
            .with(COMPARE_OPERATION, &(libc::NFT_CMP_EQ as u32).to_be_bytes())
            .nest(COMPARE_DATA, |data| data.with(DATA_VALUE, value))
    })
}

fn drop_packet(rule: Message) -> Message {
    expression(rule, "immediate", |data| {
        data.with(IMMEDIATE_REGISTER, &(libc::NFT_REG_VERDICT as u32).to_be_bytes()).nest(
            IMMEDIATE_DATA,
            |data| {
                data.nest(DATA_VERDICT, |verdict| {
                    verdict.with(VERDICT_CODE, &(libc::NF_DROP as u32).to_be_bytes())
                })
            },
        )
    })
}

fn expression(rule: Message, name: &str, data: impl FnOnce(Message) -> Message) -> Message {
    rule.nest(ELEMENT, |element| element.text(EXPRESSION_NAME, name).nest(EXPRESSION_DATA, data))
}
