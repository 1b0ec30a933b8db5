// node hello.js PORT NAME: one TLS connection to a loopback port, asking for the name.
const tls = require('node:tls');

const [port, servername] = process.argv.slice(2);
tls.connect({ host: '127.0.0.1', port, servername, ALPNProtocols: ['h2', 'http/1.1'] })
  .on('error', (error) => { console.error(String(error)); process.exit(1); });
